"""The paper's evaluation: the best validation accuracy of all rounds, before and after tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.algorithms._bases.submodel import SubmodelServer
from parsifl.core.errors import CheckpointError
from parsifl.core.keys import Key
from parsifl.data import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine import checkpoint
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientRequest
from parsifl.engine.record import select_round
from parsifl.engine.run import Run
from parsifl.engine.settings import Evaluation
from parsifl.engine.training import RoundEnd
from parsifl_reproduction.recipe import Values

MOMENTUM, DECAY = 0.9, 5e-4
PROTOCOL = Evaluation(select="best-validation", weighting="uniform")
"""Every round is evaluated without fine-tuning; the best one is fine-tuned when the run is over."""


class BestServer:
    """A callback that keeps the server of the round with the best validation accuracy.

    With a folder it is a checkpoint there, so that a resumed run still has it.
    """

    reads_scores = True

    def __init__(self, folder: Path | None) -> None:
        self._place = None if folder is None else folder / "best"
        self._server: Any = None

    def __call__(self, event: RoundEnd) -> None:
        """Keep the server if no earlier round was as good."""
        problem, records = event.problem, [*event.history, event.record]
        score, maximize = problem.primary_metric, problem.higher_is_better
        if select_round(records, "global", score, maximize, PROTOCOL.select) is not event.record:
            return
        self._server = event.server
        if self._place is not None:
            state = checkpoint.Checkpoint(event.record.round, event.server)
            checkpoint.save(self._place, state, lambda _: {})

    def of(self, run: Run) -> Any:
        """Return the best server of a finished run."""
        if self._server is None and self._place is not None:
            found = checkpoint.load(self._place, run.algorithm.tree_types())
            self._server = None if found is None else found.server
        if self._server is None:
            raise CheckpointError(
                f"{self._place} has no checkpoint of the best round; delete the folder of this job "
                "to run it again"
            )
        return self._server


@dataclass(frozen=True)
class Scores:
    """Test accuracy over devices, in percent."""

    mean: float
    std: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scores:
        """Summarize one value per device; `worst` is the mean of the worst tenth."""
        percent = np.sort(100 * np.array(values))
        tenth = max(1, round(len(percent) / 10))
        return cls(float(percent.mean()), float(percent.std()), float(percent[:tenth].mean()))


def collected(
    run: Run, best: BestServer, data: ClientData, epochs: Sequence[int], batch_size: int
) -> Values:
    """Return accuracies before and after fine-tuning, curves, costs per device, and the masks."""
    head, server = run.summary(), best.of(run)
    tuned = {
        str(count): vars(fine_tuned(run, server, head["global_round"], data, count, batch_size))
        for count in epochs
    }
    last = run.records[-1].scores["global"]
    found: Values = {
        "before": 100 * head["global"]["mean"],
        "tuned": tuned,
        "round": head["global_round"],
        "validation": [
            100 * record.scores["global"]["validation"]["accuracy"]["mean"]
            for record in run.records
        ],
        "bytes_up": head["bytes_up"],
        "bytes_down": head["bytes_down"],
        "dropped": head["dropped"],
        **_costs(run.metrics[0]["devices"]),
    }
    if "train" in last:
        found["train_loss"] = [
            record.scores["global"]["train"]["loss"]["mean"] for record in run.records
        ]
        found["train_accuracy"] = 100 * last["train"]["accuracy"]["mean"]
    if isinstance(server, SubmodelServer) and server.masks:
        found["masks"] = [list(mask) for mask in server.masks]
        found["chosen"] = list(server.chosen)
    return found


def fine_tuned(
    run: Run, server: Any, round: int, data: ClientData, epochs: int, batch_size: int
) -> Scores:
    """Fine-tune the model of a round on every device; return the accuracies on test rows."""
    evaluation = Evaluation(
        fine_tune_epochs=epochs,
        fine_tune_lr=None,  # the rate of the round, as in the authors' code
        fine_tune_batch_size=batch_size,
        fine_tune_momentum=MOMENTUM,
        fine_tune_weight_decay=DECAY,
    )
    pool = LocalPool(
        run.pool.program,
        replace(data, validation=Ragged.empty(len(data))),
        executor=run.pool.executor,
        block=len(data),
        evaluation=evaluation,
        store=run.pool.store,
    )
    scores = pool.evaluate(_requests(run, server, Key(run.seed, round=round - 1)), server)
    return Scores.of([each.values["personal"]["test"]["accuracy"] for each in scores])


def _requests(run: Run, server: Any, key: Key) -> Iterator[ClientRequest]:
    for client in run.pool.clients:
        here = key.replace(client=client.id, purpose="broadcast")
        message = run.algorithm.broadcast(run.problem, server, client, here)
        yield ClientRequest(client, key, message, upload=False)


def _costs(devices: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean over the devices of the first round."""
    clients = sum(row["clients"] for row in devices)
    return {
        name: sum(row["clients"] * row[name] for row in devices) / clients
        for name in ("forward", "backward", "trainable", "sent")
    }
