"""Applies an `Evaluation`: the global model on everybody's rows, each personal model on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl import wire
from parsifl.algorithm import AnyMethod, ClientInfo
from parsifl.algorithms.settings import LocalSGD
from parsifl.data.clients import ClientData
from parsifl.engine import executors
from parsifl.engine.evaluation import Evaluation, Scores, Split
from parsifl.engine.executors import Executor
from parsifl.engine.round import first_state
from parsifl.engine.shards import Shards
from parsifl.engine.store import ClientStore
from parsifl.engine.tasks import Task, reason
from parsifl.errors import ClientError, ConfigError, DataError
from parsifl.keys import Key
from parsifl.problem import Model, Problem
from parsifl.solvers.sgd import sgd
from parsifl.wire import Precision
from parsifl.work import Draw, Rows, Shard, Work

FINE_TUNE = "evaluation/fine-tune"
PIECE_BYTES = 8 << 20  # of the rows that a global model is judged on at once
_STATISTICS_ROWS = 128  # models with batch statistics are judged in batches of this size


class Judge:
    """Judges the models of one run; judging never changes what the run keeps."""

    def __init__(
        self,
        method: AnyMethod,
        problem: Problem,
        data: ClientData,
        infos: Sequence[ClientInfo],
        shards: Shards,
        evaluation: Evaluation,
        precision: Precision = "exact",
    ) -> None:
        self._method, self._problem, self._data = method, problem, data
        self._infos, self._shards, self._evaluation = infos, shards, evaluation
        self._precision: Precision = precision
        if evaluation.fine_tune_lr is None and not isinstance(method, LocalSGD):
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
        sizes = np.array([len(parts[client]) for client in judged])
        if model.problem.rows_interact:
            means = [_weighted_means(model, self._shards.rows(parts[i])) for i in judged]
            values = {n: np.array([float(m[n]) for m in means]) for n in means[0]}
            return Scores(np.array(judged), sizes, values)
        rows = np.concatenate([parts[client] for client in judged])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        try:
            metrics = self._row_metrics(model, rows)
        except (IndexError, RuntimeError, ValueError) as error:
            raise DataError(
                f"the global model cannot be judged on the {split} rows ({reason(error)}); do its "
                "inputs and outputs fit the data, and are all labels below its outputs?"
            ) from error
        values = {name: np.add.reduceat(column, starts) / sizes for name, column in metrics.items()}
        return Scores(np.array(judged), sizes, values)

    def _row_metrics(
        self, model: Model, rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Judge rows piece by piece: neither they nor what the layers make of them fit at once."""
        size = _piece(self._data)
        found = [
            model.problem.metrics(model.params, self._shards.rows(rows[at : at + size]))
            for at in range(0, len(rows), size)
        ]
        return {
            name: np.concatenate([piece[name].double().numpy() for piece in found])
            for name in found[0]
        }

    def personal_scores(
        self,
        server: Any,
        store: ClientStore,
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
        if self._problem.rows_interact and executor != "forked":
            executor = "loop"  # padding would enter the statistics of a batch
        means: dict[int, dict[str, Tensor]] = {}
        fallbacks: list[str] = []
        for at in range(0, len(judged), block):
            window = judged[at : at + block]
            tasks = [self._task(server, store, i, self._shards.rows(parts[i]), key) for i in window]
            outcome = executors.run(self.judge_one, tasks, executor, block)
            for client, failure in outcome.failures.items():
                raise ClientError("judging", client, key.round + 1, failure)
            means.update(outcome.results)
            fallbacks += outcome.fallbacks
        sizes = np.array([len(parts[client]) for client in judged])
        values = {n: np.array([float(means[i][n]) for i in judged]) for n in means[judged[0]]}
        return Scores(np.array(judged), sizes, values, tuple(fallbacks))

    def own_score(
        self, down: Any, store: ClientStore, client: int, split: Split, key: Key
    ) -> dict[str, float] | None:
        """Judge the personal model of one client that received `down`; None if it has no rows."""
        part = self._parts(split)[client]
        if not len(part):
            return None
        arguments = self._received_arguments(down, store, client, key)
        means = self.judge_one(*arguments, self._shards.rows(part))
        return {name: float(value) for name, value in means.items()}

    def personal_model(self, server: Any, store: ClientStore, client: int, key: Key) -> Model:
        """Return one client's personal model."""
        down, state, shard = self._arguments(server, store, client, key)
        return self._tuned(down, state, shard)

    def judge_one(self, down: Any, client: Any, shard: Shard, rows: Rows) -> dict[str, Tensor]:
        """Personalise, fine-tune and judge one client; runs under vmap for many."""
        return _weighted_means(self._tuned(down, client, shard), rows)

    def _tuned(self, down: Any, client: Any, shard: Shard) -> Model:
        model = self._method.personalize(self._problem, down, client, shard)
        if not self._evaluation.fine_tune_steps:
            return model
        told = self._evaluation
        tuned = sgd(
            model.problem,
            model.params,
            shard[FINE_TUNE],
            self._rate(shard.round),
            momentum=told.fine_tune_momentum,
            decay=told.fine_tune_decay,
        )
        return Model(model.problem, tuned)

    def _rate(self, round: int) -> float:
        given: Any = self._evaluation.fine_tune_lr  # None is for methods with a rate of their own
        if given is None and isinstance(self._method, LocalSGD):
            given = self._method.rate(round)
        return float(given)

    def _task(self, server: Any, store: ClientStore, client: int, rows: Rows, key: Key) -> Task:
        return Task(client, (*self._arguments(server, store, client, key), rows))

    def _arguments(
        self, server: Any, store: ClientStore, client: int, key: Key
    ) -> tuple[Any, Any, Shard]:
        info = self._infos[client]
        method, problem = self._method, self._problem
        sent = method.broadcast(problem, server, info, key.at(client=client, purpose="broadcast"))
        return self._received_arguments(self._received(sent), store, client, key)

    def _received_arguments(
        self, down: Any, store: ClientStore, client: int, key: Key
    ) -> tuple[Any, Any, Shard]:
        info = self._infos[client]
        first = first_state(self._method, self._problem, info, down, key)
        state = store.load(client, first)
        shard = self._shards.shard(client, self._work(info), key.at(purpose="tuning"))
        return down, state, shard

    def _received(self, sent: Any) -> Any:
        # one object for all who are sent one object: it is then shared in a batch
        if self._last[0] is not sent:
            self._last = (sent, wire.rounded(sent, self._precision))
        return self._last[1]

    def _work(self, info: ClientInfo) -> Work:
        work = self._method.tuning(info)
        if not self._evaluation.fine_tune_steps:
            return work
        draw = Draw(
            self._evaluation.fine_tune_batch,
            steps=self._evaluation.fine_tune_steps,
            partial="wrap" if self._problem.rows_interact else "pad",
        )
        return Work({**work.draws, FINE_TUNE: draw}, work.rows)

    def _parts(self, split: Split) -> Sequence[Any]:
        return self._data.test if split == "test" else self._data.validation


def _piece(data: ClientData) -> int:
    """Return how many rows are judged at once."""
    if not isinstance(data.x, Tensor):
        return max(1, data.x.shape[0])
    return max(1, PIECE_BYTES // max(1, data.x[:1].nbytes))


def _weighted_means(model: Model, rows: Rows) -> dict[str, Tensor]:
    if model.problem.rows_interact:
        return _batchwise_means(model, rows)
    metrics = model.problem.metrics(model.params, rows)
    total = rows.weight.sum().clamp(min=1)
    return {name: (column * rows.weight).sum() / total for name, column in metrics.items()}


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
