"""Judges personal models as they are, client by client.

Batches of clients would be slower here: they copy every model first, and a model reads a client's
few rows only once. What clients share is the gathering of rows and the scoring of outputs: both
take longer to call than to compute. A client's numbers are those it would find alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl.core.batching import Rows
from parsifl.core.problem import Model
from parsifl.engine.tasks import Outcome, Task, run_alone
from parsifl.engine.threads import run_jobs, single_threaded

T = TypeVar("T")
Columns = dict[str, npt.NDArray[np.float64]]
"""A metric of each row, or of each client."""
_OUTPUT = "output of a network"
_ALIGNED = 64  # bytes: memory of its own begins at a multiple


def run_on_one_core(jobs: Sequence[Callable[[], T]], *, threads: bool = True) -> list[T]:
    """Return what jobs return; each has one core, so that no bit depends on their number."""
    if threads and len(jobs) > 1:
        return run_jobs(jobs)
    with single_threaded():
        return [job() for job in jobs]


@final
@dataclass(frozen=True)
class Untuned:
    """How the personal models of a run are judged.

    Attributes
    ----------
    model
        Makes the personal model of a client.
    alone
        Judges a model on the rows of one client, however many they are.
    gathered, parts
        Gathers rows by number; the numbers of everybody's rows.
    most
        Rows of several clients that are scored together.
    """

    model: Callable[[int], Model]
    alone: Callable[[Model, int], Columns]
    gathered: Callable[[npt.NDArray[np.int64]], Rows]
    parts: Sequence[Any]
    most: int

    def judge(self, ids: Sequence[int], *, threads: bool) -> Outcome:
        """Return the means over the rows of each client.

        Every client is judged on one core, in several threads or not: no bit depends on it.
        """
        outcome = Outcome()
        jobs = [partial(self._judge_chunk, chunk) for chunk in self._chunks(ids)]
        for part in run_on_one_core(jobs, threads=threads):
            outcome.add(part)
        return outcome

    def _chunks(self, ids: Sequence[int]) -> Iterator[list[int]]:
        chunk: list[int] = []
        rows = 0
        for client in ids:
            rows += len(self.parts[client])
            if chunk and rows > self.most:
                yield chunk
                chunk, rows = [], len(self.parts[client])
            chunk.append(client)
        yield chunk

    def _judge_chunk(self, ids: Sequence[int]) -> Outcome:
        outcome = Outcome()
        try:
            if len(ids) > 1:
                outcome.results = self._together(ids)
                return outcome
        except Exception:  # isolate: whoever raises alone is the culprit
            outcome.results = {}
        for client in ids:
            run_alone(self._by_itself, Task(client, (client,)), outcome)
        return outcome

    def _by_itself(self, client: int) -> dict[str, float]:
        found = self.alone(self.model(client), client)
        return {name: float(column[0]) for name, column in found.items()}

    def _together(self, ids: Sequence[int]) -> dict[int, dict[str, float]]:
        sizes = np.array([len(self.parts[client]) for client in ids])
        ends = np.cumsum(sizes)
        rows = self.gathered(np.concatenate([self.parts[client] for client in ids]))
        columns = self._metrics(ids, ends.tolist(), rows)
        starts = np.concatenate([[0], ends[:-1]])
        means = {
            name: (np.add.reduceat(column.double().numpy(), starts) / sizes).tolist()
            for name, column in columns.items()
        }
        return {
            client: {name: values[place] for name, values in means.items()}
            for place, client in enumerate(ids)
        }

    def _metrics(self, ids: Sequence[int], ends: Sequence[int], rows: Rows) -> dict[str, Tensor]:
        """Judge every row; the outputs of networks are scored together."""
        pieces: list[dict[str, Tensor]] = []
        score: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None
        start = 0
        for client, end in zip(ids, ends, strict=True):
            model, x = self.model(client), _cut(rows.x, start, end)
            score = getattr(model.problem, "output_metrics", None)
            if score is not None:
                pieces.append({_OUTPUT: model.problem.predict(model.params, x)})
            else:
                own = Rows(x, rows.y[start:end], rows.weight[start:end])
                pieces.append(model.problem.metrics(model.params, own))
            start = end
        found = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return found if score is None else score(found[_OUTPUT], rows.y)


def _cut(x: Any, start: int, end: int) -> Any:
    """Return some rows; where they begin in memory may decide the last bit of a product."""
    part = x[start:end]
    if isinstance(part, Tensor) and part.data_ptr() % _ALIGNED:
        return part.clone()
    return part
