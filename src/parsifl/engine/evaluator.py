"""Applies an `Evaluation`: the global model on everybody's rows, each personal model on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest, Rows
from parsifl.core.errors import ClientError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem, execution
from parsifl.data.clients import ClientData
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.evaluation import Evaluation, Scores, Split
from parsifl.engine.executors import Executor
from parsifl.engine.round import initial_state
from parsifl.engine.state_store import StateStore
from parsifl.engine.tasks import Outcome, Task, reason
from parsifl.engine.untuned import Columns, Untuned, run_on_one_core
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.wire import Precision

FINE_TUNE = "evaluation/fine-tune"
PIECE_BYTES = 2 << 20  # of the rows that are judged at once, by one job
_STATISTICS_ROWS = 128  # models with batch statistics are judged in batches of this size
_WINDOW = 40  # clients that are tuned and judged at a time, in several blocks
_PIECE_ROWS = 1024  # most rows of several clients that are scored together
_LARGE = 2_000_000  # parameters times rows from which on a thread has enough to do


@dataclass(frozen=True)
class _Occasion:
    """What is judged: the states of server and clients after a round, on some rows of each."""

    server: Any
    store: StateStore
    parts: Sequence[Any]
    key: Key


class Evaluator:
    """Judges the models of one run; judging never changes what the run keeps."""

    def __init__(
        self,
        method: AnyAlgorithm,
        problem: Problem,
        data: ClientData,
        infos: Sequence[ClientInfo],
        shards: BatchSampler,
        evaluation: Evaluation,
        precision: Precision = "exact",
    ) -> None:
        self._method, self._problem, self._data = method, problem, data
        self._infos, self._shards, self._evaluation = infos, shards, evaluation
        self._precision: Precision = precision
        if evaluation.fine_tune_lr is None and method.learning_rate(0) is None:
            raise ConfigError(
                f"{type(method).__name__} has no learning rate of the round to fine-tune with; "
                "set fine_tune_lr"
            )
        self._last: tuple[Any, Any] = (None, None)  # what was sent, and what clients see of it

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self._infos)

    def global_scores(self, server: Any, ids: Sequence[int], split: Split) -> Scores | None:
        """Judge the global model on the rows of each client; None if there is no such model."""
        model = self._method.model(self._problem, server)
        return None if model is None else self.model_scores(model, ids, split)

    def model_scores(self, model: Model, ids: Sequence[int], split: Split) -> Scores | None:
        """Judge one model on the rows of each client; None if nobody has any."""
        parts = self._parts(split)
        judged = [client for client in ids if len(parts[client])]
        if not judged:
            return None
        try:
            values = self._means(model, judged, parts)
        except (IndexError, RuntimeError, ValueError) as error:
            raise DataError(
                f"the global model cannot be judged on the {split} rows ({reason(error)}); do its "
                "inputs and outputs fit the data, and are all labels below its outputs?"
            ) from error
        return Scores(np.array(judged), _sizes(judged, parts), values)

    def _means(self, model: Model, ids: Sequence[int], parts: Sequence[Any]) -> Columns:
        """Judge one model on the rows of some clients."""
        if model.problem.uses_batch_statistics:
            found = [_batchwise_means(model, self._gathered(parts[client])) for client in ids]
            return {name: np.array([float(means[name]) for means in found]) for name in found[0]}
        sizes = _sizes(ids, parts)
        rows = parts[ids[0]] if len(ids) == 1 else np.concatenate([parts[i] for i in ids])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return {
            name: np.add.reduceat(column, starts) / sizes
            for name, column in self._row_metrics(model, rows).items()
        }

    def _gathered(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return rows by number; pictures with the channels last, which halves a convolution."""
        found = self._shards.rows(rows)
        if not isinstance(found.x, Tensor) or found.x.ndim != 4:
            return found
        return replace(found, x=found.x.contiguous(memory_format=torch.channels_last))

    def _row_metrics(self, model: Model, rows: npt.NDArray[np.int64]) -> Columns:
        """Judge rows piece by piece: neither they nor what the layers make of them fit at once."""
        size = _piece(self._data)

        def judge(at: int) -> dict[str, Tensor]:
            return model.problem.metrics(model.params, self._gathered(rows[at : at + size]))

        found = run_on_one_core([partial(judge, at) for at in range(0, len(rows), size)])
        return {
            name: np.concatenate([piece[name].double().numpy() for piece in found])
            for name in found[0]
        }

    def personal_scores(
        self,
        server: Any,
        store: StateStore,
        ids: Sequence[int],
        split: Split,
        key: Key,
        executor: Executor,
        block: int,
    ) -> Scores | None:
        """Judge each client's personal model on its own rows."""
        parts = self._parts(split)
        judged = [client for client in ids if len(parts[client])]
        if not judged:
            return None
        occasion = _Occasion(server, store, parts, key)
        if not any(self._work(self._infos[client]).batches for client in judged):
            outcome = self._untuned(occasion, judged)
        elif executor in ("vmap", "fused") and not self._problem.uses_batch_statistics:
            outcome = self._in_batches(occasion, judged, executor, block)
        else:  # padding would enter the statistics of a batch
            alone: Executor = "threads" if executor == "threads" else "loop"
            tasks = [Task(client, (client,)) for client in judged]
            outcome = executors.run(partial(self._alone, occasion), tasks, alone, block)
        for client, failure in outcome.failures.items():
            raise ClientError("judging", client, key.round + 1, failure)
        found = outcome.results
        values = {n: np.array([float(found[i][n]) for i in judged]) for n in found[judged[0]]}
        return Scores(np.array(judged), _sizes(judged, parts), values, tuple(outcome.fallbacks))

    def _untuned(self, occasion: _Occasion, ids: Sequence[int]) -> Outcome:
        """Judge models that are ready."""
        parts = occasion.parts
        one_by_one = Untuned(
            model=lambda client: self._tuned(*self._arguments(occasion, client)),
            alone=lambda model, client: self._means(model, [client], parts),
            gathered=self._gathered,
            parts=parts,
            most=0 if self._problem.uses_batch_statistics else min(_piece(self._data), _PIECE_ROWS),
        )
        rows = sum(len(parts[client]) for client in ids) / len(ids)
        return one_by_one.judge(ids, threads=self._weight * rows >= _LARGE)

    @cached_property
    def _weight(self) -> float:
        """What a row costs, in parameters that are used once."""
        if execution(self._problem).expensive_rows:
            return math.inf
        return sum(value.numel() for value in self._problem.init(Key(0)).values())

    def _in_batches(
        self, occasion: _Occasion, ids: Sequence[int], executor: Executor, block: int
    ) -> Outcome:
        """Tune and judge several blocks of clients at a time: they are what threads share."""
        outcome = Outcome()
        window = max(block, _WINDOW)
        for at in range(0, len(ids), window):
            tasks = []
            for client in ids[at : at + window]:
                rows = self._shards.rows(occasion.parts[client])
                tasks.append(Task(client, (*self._arguments(occasion, client), rows)))
            outcome.add(executors.run(self.judge_one, tasks, executor, block))
        return outcome

    def _alone(self, occasion: _Occasion, client: int) -> dict[str, Tensor]:
        model = self._tuned(*self._arguments(occasion, client))
        means = self._means(model, [client], occasion.parts)
        return {name: torch.from_numpy(column) for name, column in means.items()}

    def own_score(
        self, down: Any, store: StateStore, client: int, split: Split, key: Key
    ) -> dict[str, float] | None:
        """Judge the personal model of one client that received `down`; None if it has no rows."""
        if not len(self._parts(split)[client]):
            return None
        model = self._tuned(*self._received_arguments(down, store, client, key))
        means = self._means(model, [client], self._parts(split))
        return {name: float(column[0]) for name, column in means.items()}

    def personal_model(self, server: Any, store: StateStore, client: int, key: Key) -> Model:
        """Return one client's personal model."""
        occasion = _Occasion(server, store, (), key)
        return self._tuned(*self._arguments(occasion, client))

    def judge_one(
        self, down: Any, client: Any, shard: ClientRoundData, rows: Rows
    ) -> dict[str, Tensor]:
        """Personalise, tune and judge one client; runs under vmap for many, with padded rows."""
        model = self._tuned(down, client, shard)
        metrics = model.problem.metrics(model.params, rows)
        total = rows.weight.sum().clamp(min=1)
        return {name: (column * rows.weight).sum() / total for name, column in metrics.items()}

    def _tuned(self, down: Any, client: Any, shard: ClientRoundData) -> Model:
        model = self._method.personalize(self._problem, down, client, shard)
        if not self._evaluation.fine_tune_steps:
            return model
        told = self._evaluation
        tuned = sgd(
            model.problem,
            model.params,
            shard[FINE_TUNE],
            SgdConfig(self._rate(shard.round), told.fine_tune_momentum, told.fine_tune_decay),
        )
        return Model(model.problem, tuned)

    def _rate(self, round: int) -> float:
        given: Any = self._evaluation.fine_tune_lr
        rate: Any = self._method.learning_rate(round) if given is None else given
        return float(rate)

    def _arguments(self, occasion: _Occasion, client: int) -> tuple[Any, Any, ClientRoundData]:
        key = occasion.key.replace(client=client, purpose="broadcast")
        info = self._infos[client]
        sent = self._method.broadcast(self._problem, occasion.server, info, key)
        down = self._received(sent)
        return self._received_arguments(down, occasion.store, client, occasion.key)

    def _received_arguments(
        self, down: Any, store: StateStore, client: int, key: Key
    ) -> tuple[Any, Any, ClientRoundData]:
        info = self._infos[client]
        first = initial_state(self._method, self._problem, info, down, key)
        state = store.load(client, first)
        shard = self._shards.shard(client, self._work(info), key.replace(purpose="tuning"))
        return down, state, shard

    def _received(self, sent: Any) -> Any:
        # one object for all who are sent one object: it is then shared in a batch
        last = self._last  # read once: threads may judge at the same time
        if last[0] is not sent:
            self._last = last = (sent, wire.as_received(sent, self._precision))
        return last[1]

    def _work(self, info: ClientInfo) -> DataRequest:
        work = self._method.personalization_batches(info)
        if not self._evaluation.fine_tune_steps:
            return work
        draw = BatchSpec(
            self._evaluation.fine_tune_batch,
            steps=self._evaluation.fine_tune_steps,
            last_batch="wrap" if self._problem.uses_batch_statistics else "pad",
        )
        return DataRequest({**work.batches, FINE_TUNE: draw}, work.rows)

    def _parts(self, split: Split) -> Sequence[Any]:
        return self._data.test if split == "test" else self._data.validation


def _sizes(ids: Sequence[int], parts: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.array([len(parts[client]) for client in ids])


def _piece(data: ClientData) -> int:
    """Return how many rows are judged at once."""
    if not isinstance(data.x, Tensor):
        return max(1, data.x.shape[0])
    return max(1, PIECE_BYTES // max(1, data.x[:1].nbytes))


def _batchwise_means(model: Model, rows: Rows) -> dict[str, Tensor]:
    size = _STATISTICS_ROWS
    parts = [
        model.problem.metrics(
            model.params,
            Rows(rows.x[i : i + size], rows.y[i : i + size], rows.weight[i : i + size]),
        )
        for i in range(0, len(rows.y), size)
    ]
    return {name: torch.cat([part[name] for part in parts]).mean() for name in parts[0]}
