"""Clients in this process: batches, states, executors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from parsifl import wire
from parsifl.core.errors import CapabilityError, WireError
from parsifl.core.problem import Model
from parsifl.data.clients import ClientData
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.costs import FlopCounter
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.executors import CPU, Executor, Outcome, Task, placed
from parsifl.engine.finite import inspect
from parsifl.engine.pool import (
    Answer,
    ClientFailure,
    ClientProgram,
    ClientRequest,
    ClientResult,
    ClientScores,
    Json,
    PendingEvaluation,
)
from parsifl.engine.profiling import ONCE, PhaseTimer
from parsifl.engine.settings import WINDOW, Evaluation
from parsifl.engine.state_store import SegmentStore, StateStore
from parsifl.engine.threads import single_threaded
from parsifl.wire import MessageStats, Precision

T = TypeVar("T")
EVALUATION_WINDOW = 2000
_CLIENTS = "clients"
_OUTSIDE = "outside"
"""The phase of the loop between answers of the pool."""


class LocalPool:
    """Clients in this process.

    Parameters
    ----------
    program, data
        What clients compute, and on which rows.
    executor, block
        How clients run, and how many share a batch.
    window
        How many clients are prepared at a time.
    precision
        The precision of values in messages.
    evaluation
        How models are evaluated.
    store
        Where client states are kept.
    device
        Where clients compute.
    """

    deferred_evaluation = False

    def __init__(
        self,
        program: ClientProgram,
        data: ClientData,
        *,
        executor: Executor = "loop",
        block: int = 1,
        window: int = WINDOW,
        precision: Precision = "exact",
        evaluation: Evaluation | None = None,
        store: StateStore | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.program, self.clients = program, Infos(data)
        self.executor: Executor = executor
        self.store = StateStore() if store is None else store
        self._block, self._window = block, window
        self._precision: Precision = precision
        self._sampler = BatchSampler(data, program.problem)
        self._flops = FlopCounter(program.algorithm, program.problem)
        self._evaluator = Evaluator(
            program, data, self._sampler, evaluation or Evaluation(), executor, block, device
        )
        self._run = placed(program, device)
        self._timer = PhaseTimer()
        self._saved: list[set[str]] = []

    @property
    def seconds(self) -> Mapping[str, float]:
        """The time that the last `train` spent, by phase."""
        return {name: spent for name, spent in self._timer.seconds.items() if name != _OUTSIDE}

    # ------------------------------------------------------------------ training
    def train(
        self, requests: Iterable[ClientRequest], evaluation: PendingEvaluation | None = None
    ) -> Generator[Answer, None, None]:
        """Train clients, block by block; yield their results in the order of the blocks."""
        del evaluation  # this pool does not defer
        self._timer = timer = PhaseTimer()
        before = torch.get_rng_state()
        for done in executors.imap(self._jobs(requests), self.executor):
            timer.share(done.seconds)
            answers = done.answers
            del done  # what is yielded is released, so that the next block reuses its memory
            while answers:
                answer, state = answers.popleft()
                if isinstance(answer, ClientResult):
                    self.store.save(answer.client.id, state)
                    timer.lap("state")
                yield answer
                del answer, state
                timer.lap(_OUTSIDE)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise CapabilityError(
                "the model or the algorithm draws its own random numbers, so results would not "
                "depend on the seed alone: use parsifl.models.KeyedDropout (adapt replaces "
                "nn.Dropout by it), or parsifl.keys.uniform"
            )
        timer.lap("local")

    def _jobs(self, requests: Iterable[ClientRequest]) -> Iterator[Callable[[], _Done]]:
        outbox = Outbox(self._precision)
        waiting = iter(requests)
        while window := list(islice(waiting, self._window)):
            self._timer.lap("broadcast")
            prepared = self._prepare(window, outbox)
            tasks = [item.task for item in prepared.values()]
            for job in executors.jobs(self._run, tasks, self.executor, self._block):
                yield partial(self._finish, job, prepared)

    def _prepare(self, window: list[ClientRequest], outbox: Outbox) -> dict[int, _Prepared]:
        algorithm, timer, key = self.program.algorithm, self._timer, window[0].key
        wanted = [algorithm.batches(request.client, key.round) for request in window]
        drawn = self._sampler.draw_many([r.client.id for r in window], wanted, key)
        timer.lap("draw")
        sent = [outbox.send(request.message) for request in window]
        timer.lap("encode")
        states = [
            self._state(request, received)
            for request, (received, _) in zip(window, sent, strict=True)
        ]
        timer.lap("state")
        prepared, known = {}, self._flops.structures
        for request, (received, down), state, data in zip(window, sent, states, drawn, strict=True):
            task = Task(request.client.id, (received, state, data))
            flops = self._flops.count(received, state, data)
            prepared[request.client.id] = _Prepared(request, task, down, flops)
        timer.lap("count" if self._flops.structures == known else ONCE)
        return prepared

    def _state(self, request: ClientRequest, received: Any) -> Any:
        client, seed = request.client, request.key.seed
        first = partial(self.program.initial_state, client, received, seed)
        return self.store.load(client.id, first)

    def _finish(self, job: Callable[[], Outcome], prepared: Mapping[int, _Prepared]) -> _Done:
        """Run a job; check, round and measure its messages. Several threads call this at once."""
        timer = PhaseTimer()
        outcome = job()
        timer.lap("local")
        done = _Done(timer.seconds)
        notes = tuple(outcome.fallbacks)
        with single_threaded():
            inspections = {
                client: inspect(update)
                for client, update in outcome.results.items()
                if client not in outcome.ordinary
            }
            timer.lap("check")
            sent: dict[int, tuple[Any, MessageStats] | str] = {}
            # in reverse order: the uploads that are added first are then still in the cache
            for client in sorted(outcome.results, reverse=True):
                fault = inspections[client].fault if client in inspections else ""
                request, data = prepared[client].request, prepared[client].task.arguments[2]
                fault = self.program.cause(fault, data, request.key.seed)
                sent[client] = fault or self._send(outcome.results[client], prepared[client])
            timer.lap("encode")
        for client in sorted({*outcome.results, *outcome.failures}):
            item = prepared[client]
            message = outcome.failures.get(client) or sent[client]
            if isinstance(message, str):
                failure = ClientFailure(item.request.client, message, item.down)
                done.answers.append((failure, None))
                continue
            update = outcome.results[client]
            result = ClientResult(
                client=item.request.client,
                received=item.task.arguments[0],
                upload=message[0],
                metrics=update.metrics,
                down=item.down,
                up=message[1],
                flops=item.flops,
                notes=notes,
                largest=inspections[client].largest if client in inspections else 0.0,
            )
            notes = ()
            state = update.state
            if self._precision != "exact" and item.request.upload:
                state = self.program.acknowledge(state, update.upload, message[0])
            done.answers.append((result, state))
        return done

    def _send(self, update: Any, item: _Prepared) -> tuple[Any, MessageStats] | str:
        if not item.request.upload:
            return None, MessageStats()
        try:
            return Outbox(self._precision).send(self.program.compact(update.upload))
        except WireError as error:  # values beyond the range of this precision
            return f"upload {error}"

    # ------------------------------------------------------------------ evaluation
    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        """Evaluate the global model and personal models."""
        model = self.program.algorithm.model(self.program.problem, server)
        waiting, load = iter(requests), self._loader()
        while window := list(islice(waiting, EVALUATION_WINDOW)):
            yield from self._evaluator.scores(window, model, load)

    def personal(self, request: ClientRequest) -> Model:
        """Return a client's personal model."""
        return self._evaluator.personal_model(request, self._loader())

    def _loader(self) -> Callable[[ClientRequest], tuple[Any, Any]]:
        outbox = Outbox(self._precision)

        def load(request: ClientRequest) -> tuple[Any, Any]:
            received = outbox.receive(request.message)
            return received, self._state(request, received)

        return load

    # ------------------------------------------------------------------ checkpoints
    def save(self, directory: Path) -> Json:
        """Write client states; delete files that neither of the last two checkpoints needs.

        The loop calls this again only after the checkpoint of the previous call is on disk.
        """
        states = self.store.flush_to(directory / _CLIENTS)
        segments = states.sync()
        states.delete_stale(set().union(*self._saved))
        self._saved = [*self._saved[-1:], {name for name, *_ in segments}]
        return {"segments": segments}

    def restore(self, directory: Path, saved: Json) -> None:
        """Read client states."""
        kind = self.program.algorithm.tree_types().client
        segments = saved["segments"]
        self.store.restore(SegmentStore.open(directory / _CLIENTS, segments, kind))
        self._saved = [{str(name) for name, *_ in segments}]


class Outbox:
    """Rounds and measures messages; an object that is sent to many clients is measured once.

    It is enough to remember the last object. A reference keeps its id from being reused.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision: Precision = precision
        self._last: tuple[Any, Any, MessageStats | None] = (None, None, MessageStats())

    def send(self, message: Any) -> tuple[Any, MessageStats]:
        """Return the message as received, and its encoded size; None is not sent."""
        if message is None:
            return None, MessageStats()
        sent, received, stats = self._last
        if sent is not message or stats is None:
            received = wire.as_received(message, self._precision)
            stats = wire.measure(message, self._precision)
            self._last = (message, received, stats)
        return received, stats

    def receive(self, message: Any) -> Any:
        """Return the message as received; thread-safe."""
        if message is None:
            return None
        sent, received, _ = self._last
        if sent is not message:
            received = wire.as_received(message, self._precision)
            self._last = (message, received, None)
        return received


class _Prepared(NamedTuple):
    request: ClientRequest
    task: Task
    down: MessageStats
    flops: int | None


@dataclass
class _Done:
    """The answers and new states of a block, and the time it took by phase."""

    seconds: dict[str, float]
    answers: deque[tuple[ClientResult | ClientFailure, Any]] = field(default_factory=deque)
