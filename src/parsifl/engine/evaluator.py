"""Evaluate the global model on all rows, and each personal model on its client's rows.

Evaluation has no side effects on the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest, Rows
from parsifl.core.errors import ClientError, ConfigError, DataError, reason
from parsifl.core.keys import Key
from parsifl.core.metrics import Metric, extra_metrics, scored
from parsifl.core.problem import Model, execution
from parsifl.data.clients import ClientData, RowsByClient
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.executors import CPU, Executor, Outcome, Task, placed, run_alone
from parsifl.engine.pool import ClientProgram, ClientRequest, ClientScores
from parsifl.engine.record import SPLITS
from parsifl.engine.settings import Evaluation
from parsifl.engine.threads import run_jobs, single_threaded
from parsifl.solvers.sgd import SgdConfig, sgd

T = TypeVar("T")
Load = Callable[[ClientRequest], tuple[Any, Any]]
"""Returns the message that a client received, and its state."""
Columns = dict[str, npt.NDArray[np.float64]]
"""A metric of each row, or of each client."""
FINE_TUNE = "evaluation/fine-tune"
PIECE_BYTES = 2 << 20  # of the rows that one job evaluates at once
_STATISTICS_ROWS = 128  # the batch size for models that use batch statistics
_WINDOW = 40  # clients that are fine-tuned and evaluated at a time, in several blocks
_PIECE_ROWS = 1024  # most rows of several clients that are scored together
_LARGE = 2_000_000  # parameters times rows above which a thread is worthwhile
_ALIGNED = 64  # bytes: newly allocated memory is aligned to a multiple of this
_OUTPUT = "output of a network"  # no identifier, so no name of a metric
_TARGET = "targets of rows"


class Evaluator:
    """Evaluates the models of one run."""

    def __init__(
        self,
        program: ClientProgram,
        data: ClientData,
        sampler: BatchSampler,
        evaluation: Evaluation,
        executor: Executor = "loop",
        block: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self._algorithm, self._problem = program.algorithm, program.problem
        self._metrics = extra_metrics(program.problem)
        of_sets = any(each.per_set is not None for each in self._metrics)
        self._alone = self._problem.uses_batch_statistics or of_sets
        self._data, self._sampler, self._evaluation = data, sampler, evaluation
        self._executor: Executor = executor
        self._block, self._device = block, device
        if evaluation.fine_tune_lr is None and self._algorithm.learning_rate(0) is None:
            raise ConfigError(
                f"{self._algorithm.title()} has no learning rate to fine-tune with; set "
                "fine_tune_lr"
            )

    def scores(
        self, requests: Sequence[ClientRequest], model: Model | None, load: Load
    ) -> Iterator[ClientScores]:
        """Evaluate the global model (None: there is none) and the personal model of each client."""
        asked = {request.client.id: request for request in requests}
        samples: dict[int, dict[str, int]] = {client: {} for client in asked}
        values: dict[int, dict[str, dict[str, Any]]] = {client: {} for client in asked}
        notes: tuple[str, ...] = ()
        unchanged = set() if model is None else self._with_global_model(requests, model, load)
        for split in SPLITS[0 if self._evaluation.train else 1 :]:
            parts = self._parts(split)
            ids = [client for client in asked if len(parts[client])]
            if not ids:
                continue
            personal, more = self._personal_means([asked[i] for i in ids], parts, load)
            notes += more
            shared = {client: personal[client] for client in ids if client in unchanged}
            others = [client for client in ids if client not in unchanged]
            if others and model is not None:
                shared.update(self._global_means(model, others, split))
            for client in ids:
                samples[client][split] = len(parts[client])
                values[client].setdefault("personal", {})[split] = personal[client]
                if client in shared:
                    values[client].setdefault("global", {})[split] = shared[client]
        for client, request in asked.items():
            yield ClientScores(request.client, samples[client], values[client], notes)
            notes = ()

    def _with_global_model(
        self, requests: Sequence[ClientRequest], model: Model, load: Load
    ) -> set[int]:
        """Return the clients whose personal model is the global one: its scores are theirs.

        Where the first client has another model, so have the others, and no state is read.
        """
        clients: set[int] = set()
        for request in requests:
            if self._request(request.client).batches:
                return clients
            try:
                personal = self.personal_model(request, load)
            except Exception:  # reported where this model is evaluated
                return clients
            if personal.problem is not model.problem or personal.params is not model.params:
                return clients
            clients.add(request.client.id)
        return clients

    # ------------------------------------------------------------------ the global model
    def _global_means(
        self, model: Model, ids: Sequence[int], split: str
    ) -> Mapping[int, Mapping[str, float]]:
        try:
            columns = self._means(model, ids, self._parts(split))
        except (IndexError, RuntimeError, ValueError) as error:
            raise DataError(
                f"the global model cannot be evaluated on the {split} rows ({reason(error)}): "
                "check that its inputs and outputs match the data and that all labels are below "
                "its number of outputs"
            ) from error
        return _by_client(ids, columns)

    def _means(self, model: Model, ids: Sequence[int], parts: RowsByClient) -> Columns:
        """Evaluate one model on the rows of some clients."""
        if model.problem.uses_batch_statistics:
            client_means = [
                _batchwise_means(model, self._gathered(parts[client]), self._metrics)
                for client in ids
            ]
            return {
                name: np.array([float(means[name]) for means in client_means])
                for name in client_means[0]
            }
        sizes = _sizes(ids, parts)
        rows = parts[ids[0]] if len(ids) == 1 else np.concatenate([parts[i] for i in ids])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return _client_means(self._row_metrics(model, rows), starts, sizes, self._metrics)

    def _gathered(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return rows by number; images have channels last, which halves convolution time."""
        gathered = self._sampler.rows(rows)
        if not isinstance(gathered.x, Tensor) or gathered.x.ndim != 4:
            return gathered
        return replace(gathered, x=gathered.x.contiguous(memory_format=torch.channels_last))

    def _row_metrics(self, model: Model, rows: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Evaluate rows piece by piece: all of them at once would not fit in memory."""
        size = _piece(self._data)

        def evaluate(at: int) -> dict[str, Tensor]:
            return _columns(model, self._gathered(rows[at : at + size]), self._metrics)

        pieces = _on_one_core([partial(evaluate, at) for at in range(0, len(rows), size)])
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    # ------------------------------------------------------------------ personal models
    def _personal_means(
        self, requests: Sequence[ClientRequest], parts: RowsByClient, load: Load
    ) -> tuple[Mapping[int, Mapping[str, float]], tuple[str, ...]]:
        if not any(self._request(request.client).batches for request in requests):
            outcome = self._as_they_are(requests, parts, load)
        elif self._executor in ("vmap", "fused") and not self._alone:
            outcome = self._in_batches(requests, parts, load)
        else:  # padding would enter the statistics of a batch, or the score of a set of rows
            alone: Executor = "threads" if self._executor == "threads" else "loop"
            tasks = [Task(request.client.id, (request,)) for request in requests]
            by_itself = partial(self._by_itself, parts, load)
            outcome = executors.run(by_itself, tasks, alone, self._block)
        for client, failure in outcome.failures.items():
            raise ClientError("evaluation", client, requests[0].key.round + 1, failure)
        client_means = {
            client: {name: float(value) for name, value in means.items()}
            for client, means in outcome.results.items()
        }
        return client_means, tuple(outcome.fallbacks)

    def _in_batches(
        self, requests: Sequence[ClientRequest], parts: RowsByClient, load: Load
    ) -> Outcome:
        """Fine-tune and evaluate several blocks of clients at a time, in threads."""
        outcome = Outcome()
        window = max(self._block, _WINDOW)
        for at in range(0, len(requests), window):
            tasks = [
                Task(
                    request.client.id,
                    (*self._arguments(request, load), self._sampler.rows(parts[request.client.id])),
                )
                for request in requests[at : at + window]
            ]
            evaluate = placed(self._evaluate_one, self._device)
            outcome.add(executors.run(evaluate, tasks, self._executor, self._block))
        return outcome

    def _evaluate_one(
        self, received: Any, state: Any, data: ClientRoundData, rows: Rows
    ) -> dict[str, Tensor]:
        """Personalize, fine-tune and evaluate one client; under vmap for many, with padded rows."""
        model = self._personalized(received, state, data)
        metrics = _columns(model, rows, self._metrics)
        total = rows.weight.sum().clamp(min=1)
        return {name: (column * rows.weight).sum() / total for name, column in metrics.items()}

    def _by_itself(
        self, parts: RowsByClient, load: Load, request: ClientRequest
    ) -> dict[str, float]:
        model = self._personalized(*self._arguments(request, load))
        return _by_client([0], self._means(model, [request.client.id], parts))[0]

    def personal_model(self, request: ClientRequest, load: Load) -> Model:
        """Return one client's personal model."""
        return self._personalized(*self._arguments(request, load))

    def _personalized(self, received: Any, state: Any, data: ClientRoundData) -> Model:
        model = self._algorithm.personalize(self._problem, received, state, data)
        settings = self._evaluation
        if not settings.fine_tunes:
            return model
        rate: Any = settings.fine_tune_lr
        if rate is None:
            rate = self._algorithm.learning_rate(data.round)
        config = SgdConfig(rate, settings.fine_tune_momentum, settings.fine_tune_weight_decay)
        tuned = sgd(model.problem, model.params, data[FINE_TUNE], config)
        return Model(model.problem, tuned)

    def _arguments(self, request: ClientRequest, load: Load) -> tuple[Any, Any, ClientRoundData]:
        key = request.key.replace(purpose="tuning")
        data = self._sampler.draw(request.client.id, self._request(request.client), key)
        return (*load(request), data)

    def _request(self, client: ClientInfo) -> DataRequest:
        wanted, settings = self._algorithm.personalization_batches(client), self._evaluation
        if not settings.fine_tunes:
            return wanted
        spec = BatchSpec(
            settings.fine_tune_batch_size,
            steps=settings.fine_tune_steps or None,
            epochs=settings.fine_tune_epochs or None,
            last_batch="wrap" if self._problem.uses_batch_statistics else "pad",
        )
        return DataRequest({**wanted.batches, FINE_TUNE: spec}, wanted.rows)

    # ------------------------------------------------------------------ models without fine-tuning
    # Batches of clients would be slower here: they copy every model first, and a model reads a
    # client's few rows only once. Clients share the gathering of rows and the scoring of outputs,
    # where calls cost more than arithmetic. A client gets the same numbers as it would alone.
    def _as_they_are(
        self, requests: Sequence[ClientRequest], parts: RowsByClient, load: Load
    ) -> Outcome:
        rows = sum(len(parts[request.client.id]) for request in requests) / len(requests)
        jobs = [
            partial(self._evaluate_chunk, chunk, parts, load)
            for chunk in self._chunks(requests, parts)
        ]
        outcome = Outcome()
        for part in _on_one_core(jobs, threads=self._weight * rows >= _LARGE):
            outcome.add(part)
        return outcome

    @cached_property
    def _weight(self) -> float:
        """The cost of a row relative to one use of each parameter."""
        if execution(self._problem).expensive_rows:
            return math.inf
        return sum(value.numel() for value in self._problem.init(Key(0)).values())

    def _chunks(
        self, requests: Sequence[ClientRequest], parts: RowsByClient
    ) -> Iterator[list[ClientRequest]]:
        together = not self._problem.uses_batch_statistics
        most = min(_piece(self._data), _PIECE_ROWS) if together else 0
        chunk: list[ClientRequest] = []
        rows = 0
        for request in requests:
            n_rows = len(parts[request.client.id])
            rows += n_rows
            if chunk and rows > most:
                yield chunk
                chunk, rows = [], n_rows
            chunk.append(request)
        yield chunk

    def _evaluate_chunk(
        self, chunk: Sequence[ClientRequest], parts: RowsByClient, load: Load
    ) -> Outcome:
        outcome = Outcome()
        try:
            if len(chunk) > 1:
                outcome.results = self._together(chunk, parts, load)
                return outcome
        except Exception:  # isolate: the client that raises alone is the culprit
            outcome.results = {}
        for request in chunk:
            task = Task(request.client.id, (request,))
            run_alone(partial(self._by_itself, parts, load), task, outcome)
        return outcome

    def _together(
        self, chunk: Sequence[ClientRequest], parts: RowsByClient, load: Load
    ) -> dict[int, Any]:
        ids = [request.client.id for request in chunk]
        sizes = _sizes(ids, parts)
        ends = np.cumsum(sizes)
        rows = self._gathered(np.concatenate([parts[client] for client in ids]))
        models = (self._personalized(*self._arguments(request, load)) for request in chunk)
        columns = _stacked_metrics(models, ends.tolist(), rows, self._metrics)
        starts = np.concatenate([[0], ends[:-1]])
        return dict(_by_client(ids, _client_means(columns, starts, sizes, self._metrics)))

    def _parts(self, split: str) -> RowsByClient:
        return self._data.rows_by_client(split)


def _columns(model: Model, rows: Rows, metrics: Sequence[Metric]) -> dict[str, Tensor]:
    """Return the metrics of each row, and what metrics of sets of rows read."""
    columns = model.problem.metrics(model.params, rows)
    if metrics:
        columns = {**columns, **_more(metrics, *scored(model.problem, model.params, rows))}
    return columns


def _more(metrics: Sequence[Metric], output: Tensor, y: Tensor) -> dict[str, Tensor]:
    columns = {each.name: each.rows(output, y) for each in metrics if each.per_row is not None}
    if any(each.per_set is not None for each in metrics):
        columns |= {_OUTPUT: output, _TARGET: y}
    return columns


def _client_means(
    columns: Mapping[str, Tensor],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    metrics: Sequence[Metric],
) -> Columns:
    """Return one number per client, whose rows follow each other."""
    means = {
        name: np.add.reduceat(column.double().numpy(), starts) / sizes
        for name, column in columns.items()
        if name not in (_OUTPUT, _TARGET)
    }
    for metric in metrics:
        if metric.per_set is not None:
            output, y = (torch.split(columns[name], sizes.tolist()) for name in (_OUTPUT, _TARGET))
            values = [metric.value(*pair) for pair in zip(output, y, strict=True)]
            means[metric.name] = np.array(values, dtype=np.float64)
    return means


def _stacked_metrics(
    models: Iterator[Model], ends: Sequence[int], rows: Rows, metrics: Sequence[Metric]
) -> dict[str, Tensor]:
    """Evaluate every row on its client's model; the outputs of networks are scored together."""
    pieces: list[dict[str, Tensor]] = []
    score: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = None
    start = 0
    for model, end in zip(models, ends, strict=True):
        x = _cut(rows.x, start, end)
        score = getattr(model.problem, "output_metrics", None)
        if score is not None:
            pieces.append({_OUTPUT: model.problem.predict(model.params, x)})
        else:
            client_rows = Rows(x, rows.y[start:end], rows.weight[start:end])
            pieces.append(_columns(model, client_rows, metrics))
        start = end
    columns = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    if score is None:
        return columns
    return {**score(columns[_OUTPUT], rows.y), **_more(metrics, columns[_OUTPUT], rows.y)}


def _on_one_core(jobs: Sequence[Callable[[], T]], *, threads: bool = True) -> list[T]:
    """Return the results of jobs. Each uses one core, so results do not depend on their number."""
    if threads and len(jobs) > 1:
        return run_jobs(jobs)
    with single_threaded():
        return [job() for job in jobs]


def _by_client(ids: Sequence[int], columns: Columns) -> dict[int, dict[str, float]]:
    lists = {name: column.tolist() for name, column in columns.items()}
    return {
        client: {name: column[at] for name, column in lists.items()}
        for at, client in enumerate(ids)
    }


def _sizes(ids: Sequence[int], parts: RowsByClient) -> npt.NDArray[np.int64]:
    return np.array([len(parts[client]) for client in ids])


def _piece(data: ClientData) -> int:
    """Return how many rows are evaluated at once."""
    if not isinstance(data.x, Tensor):
        return max(1, data.x.shape[0])
    return max(1, PIECE_BYTES // max(1, data.x[:1].nbytes))


def _batchwise_means(model: Model, rows: Rows, metrics: Sequence[Metric]) -> dict[str, Any]:
    size = _STATISTICS_ROWS
    parts = [
        _columns(
            model,
            Rows(rows.x[i : i + size], rows.y[i : i + size], rows.weight[i : i + size]),
            metrics,
        )
        for i in range(0, len(rows.y), size)
    ]
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    of_rows = {n: c.mean() for n, c in columns.items() if n not in (_OUTPUT, _TARGET)}
    of_sets = {
        each.name: each.value(columns[_OUTPUT], columns[_TARGET])
        for each in metrics
        if each.per_set is not None
    }
    return {**of_rows, **of_sets}


def _cut(x: Any, start: int, end: int) -> Any:
    """Return some rows, aligned: their address can affect the last bit of a product."""
    part = x[start:end]
    if isinstance(part, Tensor) and part.data_ptr() % _ALIGNED:
        return part.clone()
    return part
