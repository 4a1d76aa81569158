"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem
from parsifl.engine.export import Export, export
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientRequest
from parsifl.engine.profiling import profile
from parsifl.engine.record import MODELS, RoundRecord, headline
from parsifl.engine.run_dir import RunData
from parsifl.engine.settings import Evaluation


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    Attributes
    ----------
    records
        One `RoundRecord` per round: costs always, scores where the round was evaluated.
    server
        The server's last state. Its trees sort parameters by name; those of `model` and
        `personal(client)` have the order of the problem.
    configuration
        Everything that changes a result, as in config.toml.
    run_dir
        The run directory; None if nothing was written.
    """

    algorithm: AnyAlgorithm
    problem: Problem
    records: Sequence[RoundRecord]
    server: Any
    evaluation: Evaluation
    run_dir: Path | None
    configuration: Mapping[str, Any]
    pool: LocalPool
    seed: int

    def __repr__(self) -> str:
        name, clients = self.algorithm.title(), len(self.pool.clients)
        return f"Run({name}, {len(self.records)} rounds, {clients} clients{self._scores()})"

    def _scores(self) -> str:
        score, summary = self.problem.primary_metric, self.summary()
        texts = [f"{m} {summary[m]['mean']:.3f}" for m in MODELS if summary[m] is not None]
        return f", {score}: {', '.join(texts)}" if texts else ""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records as JSON values, as in metrics.jsonl."""
        return [record.to_json() for record in self.records]

    @property
    def bytes_up(self) -> int:
        """The total number of bytes sent by clients."""
        return sum(record.bytes_up for record in self.records)

    @property
    def bytes_down(self) -> int:
        """The total number of bytes sent by the server."""
        return sum(record.bytes_down for record in self.records)

    @property
    def model(self) -> Model:
        """The global model."""
        model = self.algorithm.model(self.problem, self.server)
        if model is None:
            raise CapabilityError(
                f"{self.algorithm.title()} has no global model; use personal(client)"
            )
        return self._in_order(model)

    def _in_order(self, model: Model) -> Model:
        """Return the model with its parameters in the order of the problem (trees sort names)."""
        names = [name for name in model.problem.init(Key(0)) if name in model.params]
        rest = [name for name in model.params if name not in names]
        return Model(model.problem, {name: model.params[name] for name in (*names, *rest)})

    def personal(self, client: int) -> Model:
        """Return the personal model of a client."""
        clients = len(self.pool.clients)
        if not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise ConfigError(f"client must be between 0 and {clients - 1}, got {client!r}")
        info = self.pool.clients[int(client)]
        key = Key(self.seed, round=max(0, len(self.records) - 1))
        here = key.replace(client=info.id, purpose="broadcast")
        message = self.algorithm.broadcast(self.problem, self.server, info, here)
        return self._in_order(self.pool.personal(ClientRequest(info, key, message, upload=False)))

    def compact(self, client: int | None = None) -> Export:
        """Return the global model, or a client's, in compact form, to save or to measure."""
        if client is None:
            return export(self.model)
        shared = self.algorithm.model(self.problem, self.server)
        return export(self.personal(client), shared, client)

    def export(self, client: int | None = None) -> nn.Module:
        """Return the global model, or a client's, as a plain module for deployment.

        Layers of low rank become two thin layers where that is smaller. `compact` measures and
        saves it; docs/how-to/export.md shows both.
        """
        return self.compact(client).module()

    def profile(self) -> dict[str, float]:
        """Return the seconds of all rounds by phase, the longest first."""
        return profile(self.records)

    def recorded(self) -> RunData:
        """Return this run as `open_run` would read it from its directory, without reading it."""
        path = (
            Path(str(self.configuration["algorithm"]["name"]))
            if self.run_dir is None
            else self.run_dir
        )
        return RunData(path, self.configuration, tuple(self.records))

    def summary(self) -> dict[str, Any]:
        """Return the headline numbers, from the round that the evaluation selects."""
        return headline(
            self.records,
            self.problem.primary_metric,
            self.problem.higher_is_better,
            self.evaluation.select,
        )
