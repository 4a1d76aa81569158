"""One round: broadcast, local work, aggregation. The loop over clients is written here alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from parsifl import wire
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.errors import CapabilityError, WireError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.executors import Executor
from parsifl.engine.finite import inspect
from parsifl.engine.flops import FlopCounter
from parsifl.engine.gather import Arrival, Gathered, Ledger
from parsifl.engine.network_model import NetworkModel
from parsifl.engine.profiling import ONCE, PhaseTimer
from parsifl.engine.state_store import StateStore
from parsifl.engine.tasks import Outcome, Task
from parsifl.engine.threads import Scope, single_threaded, thread_scope
from parsifl.wire import MessageStats, Precision

LocalWork = Callable[[Any, Any, Any], ClientUpdate[Any, Any]]


@dataclass(frozen=True)
class Setting:
    """Everything that stays the same from round to round."""

    method: AnyAlgorithm
    problem: Problem
    infos: Sequence[ClientInfo]
    pool: Sequence[int]
    """The clients that may train, ascending."""
    shards: BatchSampler
    store: StateStore
    executor: Executor
    block: int
    window: int
    precision: Precision
    network: NetworkModel
    flops: FlopCounter

    @cached_property
    def scope(self) -> Scope:
        """The scope of work at the server."""
        return thread_scope(self.problem)

    @cached_property
    def local(self) -> LocalWork:
        """What a client does."""
        return local_work(self.method, self.problem)


class _Prepared(NamedTuple):
    task: Task
    bytes_down: int
    content_down: MessageStats
    flops: int | None


@dataclass(frozen=True)
class _Done:
    """What came of a job: results, who is left out and why, and what everybody sends."""

    outcome: Outcome
    failures: dict[int, str]
    sent: dict[int, tuple[Any, int, MessageStats]]
    largest: dict[int, float]
    seconds: dict[str, float]


def run_round(setting: Setting, server: Any, cohort: Sequence[int], key: Key) -> tuple[Any, Ledger]:
    """Return the next server state and the ledger.

    Clients are added up as their blocks come, in an order that does not depend on the machine.
    """
    everyone = setting.method.everyone_trains()
    training = setting.pool if everyone else cohort
    gathered = Gathered(
        setting.method,
        setting.problem,
        setting.infos,
        setting.network,
        setting.precision,
        setting.scope,
    )
    uploading = set(cohort)
    laps = PhaseTimer()
    for at in range(0, len(training), setting.window):
        prepared = _prepare(setting, server, training[at : at + setting.window], key, laps)
        _run_window(setting, prepared, uploading, gathered, laps)
    server = gathered.aggregate(server, key.replace(purpose="aggregate"))
    laps.lap("aggregate")
    gathered.ledger.seconds = laps.seconds
    return server, gathered.ledger


def local_work(method: AnyAlgorithm, problem: Problem) -> LocalWork:
    """Return what a client does with downlink, state and shard, here and where it is deployed."""
    scope = thread_scope(problem)

    def local(down: Any, client: Any, shard: Any) -> ClientUpdate[Any, Any]:
        with scope():
            return method.client_update(problem, down, client, shard)

    return local


def _run_window(
    setting: Setting,
    prepared: Sequence[_Prepared],
    uploading: set[int],
    gathered: Gathered,
    laps: PhaseTimer,
) -> None:
    items = {item.task.client: item for item in prepared}

    def book(done: _Done) -> None:
        laps.share(done.seconds)
        gathered.ledger.fallbacks += done.outcome.fallbacks
        with single_threaded():  # to wake another thread takes longer than to add up a small model
            _book(items, done, uploading, gathered)
        laps.lap("aggregate")
        for client, result in done.outcome.results.items():
            if client in done.sent:
                setting.store.save(client, result.state)
        laps.lap("state")

    before = torch.get_rng_state()
    tasks = [item.task for item in prepared]
    complete = partial(_complete, setting, uploading)
    executors.stream(setting.local, tasks, setting.executor, setting.block, complete, book)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise CapabilityError(
            "the model or the method draws random numbers of its own, so that the same seed would "
            "give other results: use parsifl.nn.models.KeyedDropout (adapt puts it in place of "
            "nn.Dropout), or parsifl.core.keys.uniform"
        )
    laps.lap("local")


def _complete(setting: Setting, uploading: set[int], job: Callable[[], Outcome]) -> _Done:
    """Do a job, and what follows from its results alone: several threads may be at it."""
    laps = PhaseTimer()
    outcome = job()
    laps.lap("local")
    with single_threaded():
        found = {
            client: inspect(result)
            for client, result in outcome.results.items()
            if client not in outcome.ordinary
        }
        faults = {client: look.fault for client, look in found.items() if look.fault}
        failures = outcome.failures | faults
        largest = {client: look.largest for client, look in found.items()}
        laps.lap("check")
        sent = {}
        # backwards: who is added up first is then still in the cache
        for client, result in reversed(outcome.results.items()):
            upload = result.upload if client in uploading else None
            try:
                if client not in failures:
                    sent[client] = _transmit(upload, setting.precision)
            except WireError as error:  # values beyond what this precision can tell
                failures[client] = f"upload {error}"
        laps.lap("encode")
    return _Done(outcome, failures, sent, largest, laps.seconds)


def _book(
    items: Mapping[int, _Prepared],
    done: _Done,
    uploading: set[int],
    gathered: Gathered,
) -> None:
    for client, failure in sorted(done.failures.items()):
        gathered.drop(client, items[client].bytes_down, failure)
    arrivals = [
        Arrival(
            client=client,
            down=(item := items[client]).task.arguments[0],
            upload=upload,
            info=done.outcome.results[client].metrics,
            bytes_down=item.bytes_down,
            bytes_up=size,
            flops=item.flops,
            uploads=client in uploading,
            content=content,
            content_down=item.content_down,
            largest=done.largest.get(client, 0.0),
        )
        for client, (upload, size, content) in sorted(done.sent.items())
    ]
    gathered.receive(*arrivals)


def _prepare(
    setting: Setting, server: Any, ids: Sequence[int], key: Key, laps: PhaseTimer
) -> list[_Prepared]:
    method, problem = setting.method, setting.problem
    infos = [setting.infos[client] for client in ids]
    works = [method.batches(info, key.round) for info in infos]
    shards = setting.shards.window(ids, works, key)
    laps.lap("draw")
    known: dict[int, tuple[Any, Any, int, MessageStats]] = {}  # a message to many is measured once
    downs = []
    for info in infos:
        here = key.replace(client=info.id, purpose="broadcast")
        sent = method.broadcast(problem, server, info, here)
        if id(sent) not in known:
            known[id(sent)] = (sent, *_transmit(sent, setting.precision))
        downs.append(known[id(sent)][1:])
    laps.lap("encode")
    states = [
        setting.store.load(info.id, initial_state(method, problem, info, down, key))
        for info, (down, _, _) in zip(infos, downs, strict=True)
    ]
    laps.lap("state")
    prepared, known_structures = [], setting.flops.structures
    for client, (down, size, content), *own in zip(ids, downs, states, shards, strict=True):
        flops = setting.flops.count(down, *own)
        prepared.append(_Prepared(Task(client, (down, *own)), size, content, flops))
    laps.lap("count" if setting.flops.structures == known_structures else ONCE)
    return prepared


def initial_state(
    method: AnyAlgorithm, problem: Problem, info: ClientInfo, down: Any, key: Key
) -> Callable[[], Any]:
    """Return the maker of a client's first state; its key does not depend on the round."""

    def make() -> Any:
        first = Key(key.seed, client=info.id, purpose="client")
        return method.init_client(problem, info, down, first)

    return make


def _transmit(message: Any, precision: Precision) -> tuple[Any, int, MessageStats]:
    """Return what the receiver sees of a message, its length, and what is in it.

    None is not sent at all.
    """
    if message is None:
        return None, 0, MessageStats(0, 0.0, 0)
    return wire.as_received(message, precision), *wire.measure(message, precision)
