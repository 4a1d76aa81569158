"""One round: broadcast, local work, aggregation. The loop over clients is written here alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parsifl import wire
from parsifl.algorithm import AnyMethod, ClientInfo, Local
from parsifl.engine import executors
from parsifl.engine.executors import Executor
from parsifl.engine.flops import FlopCounter
from parsifl.engine.gather import Arrival, Gathered, Ledger, first_not_finite
from parsifl.engine.laps import Laps
from parsifl.engine.network import Network
from parsifl.engine.shards import Shards
from parsifl.engine.store import ClientStore
from parsifl.engine.tasks import Outcome, Task
from parsifl.engine.threads import one_core, suited
from parsifl.errors import CapabilityError
from parsifl.keys import Key
from parsifl.problem import Problem
from parsifl.wire import Content, Precision


@dataclass(frozen=True)
class Setting:
    """Everything that stays the same from round to round."""

    method: AnyMethod
    problem: Problem
    infos: Sequence[ClientInfo]
    pool: Sequence[int]
    """The clients that may train, ascending."""
    shards: Shards
    store: ClientStore
    executor: Executor
    block: int
    window: int
    precision: Precision
    network: Network
    flops: FlopCounter


@dataclass(frozen=True)
class _Prepared:
    task: Task
    bytes_down: int
    content_down: Content
    flops: int | None


@dataclass(frozen=True)
class _Done:
    """What came of a job: results, who is left out and why, and what everybody sends."""

    outcome: Outcome
    failures: dict[int, str]
    sent: dict[int, tuple[Any, int, Content]]
    seconds: dict[str, float]


def run_round(setting: Setting, server: Any, cohort: Sequence[int], key: Key) -> tuple[Any, Ledger]:
    """Return the next server state and the ledger.

    Clients are added up as their blocks come, in an order that does not depend on the machine.
    """
    everyone = setting.method.trains == "everyone"
    training = setting.pool if everyone else cohort
    gathered = Gathered(
        setting.method, setting.problem, setting.infos, setting.network, setting.precision
    )
    uploading = set(cohort)
    laps = Laps()
    for at in range(0, len(training), setting.window):
        prepared = _prepare(setting, server, training[at : at + setting.window], key, laps)
        _run_window(setting, prepared, uploading, gathered, laps)
    server = gathered.aggregate(server, key.at(purpose="aggregate"))
    laps.lap("aggregate")
    gathered.ledger.seconds = laps.seconds
    return server, gathered.ledger


def local_work(method: AnyMethod, problem: Problem) -> Callable[[Any, Any, Any], Local[Any, Any]]:
    """Return what a client does with downlink, state and shard, here and where it is deployed."""
    scope = suited(problem)

    def local(down: Any, client: Any, shard: Any) -> Local[Any, Any]:
        with scope():
            return method.local(problem, down, client, shard)

    return local


def _run_window(
    setting: Setting,
    prepared: Sequence[_Prepared],
    uploading: set[int],
    gathered: Gathered,
    laps: Laps,
) -> None:
    local = local_work(setting.method, setting.problem)
    items = {item.task.client: item for item in prepared}

    def book(done: _Done) -> None:
        laps.share(done.seconds)
        gathered.ledger.fallbacks += done.outcome.fallbacks
        with one_core():  # to wake another thread takes longer than to add up a small model
            _book(items, done, uploading, gathered)
        laps.lap("aggregate")
        for client, result in done.outcome.results.items():
            if client in done.sent:
                setting.store.save(client, result.client)
        laps.lap("state")

    before = torch.get_rng_state()
    tasks = [item.task for item in prepared]
    complete = partial(_complete, setting, uploading)
    executors.stream(local, tasks, setting.executor, setting.block, complete, book)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise CapabilityError(
            "the model or the method draws random numbers of its own, so that the same seed would "
            "give other results: use parsifl.models.KeyedDropout (adapt puts it in place of "
            "nn.Dropout), or parsifl.keys.uniform"
        )
    laps.lap("local")


def _complete(setting: Setting, uploading: set[int], job: Callable[[], Outcome]) -> _Done:
    """Do a job, and what follows from its results alone: several threads may be at it."""
    laps = Laps()
    outcome = job()
    laps.lap("local")
    with one_core():
        failures = outcome.failures | {
            client: f"{bad} is not finite"
            for client, result in outcome.results.items()
            if client not in outcome.finite and (bad := first_not_finite(result))
        }
        laps.lap("check")
        sent = {
            client: _transmit(result.upload if client in uploading else None, setting.precision)
            # backwards: who is added up first is then still in the cache
            for client, result in reversed(outcome.results.items())
            if client not in failures
        }
        laps.lap("encode")
    return _Done(outcome, failures, sent, laps.seconds)


def _book(
    items: Mapping[int, _Prepared],
    done: _Done,
    uploading: set[int],
    gathered: Gathered,
) -> None:
    for client in sorted({*done.sent, *done.failures}):
        item = items[client]
        if client in done.failures:
            gathered.drop(client, item.bytes_down, done.failures[client])
            continue
        upload, size, content = done.sent[client]
        gathered.receive(
            Arrival(
                client=client,
                down=item.task.arguments[0],
                upload=upload,
                info=done.outcome.results[client].info,
                bytes_down=item.bytes_down,
                bytes_up=size,
                flops=item.flops,
                uploads=client in uploading,
                content=content,
                content_down=item.content_down,
            )
        )


def _prepare(
    setting: Setting, server: Any, ids: Sequence[int], key: Key, laps: Laps
) -> list[_Prepared]:
    method, problem = setting.method, setting.problem
    infos = [setting.infos[client] for client in ids]
    works = [method.work(info, key.round) for info in infos]
    shards = setting.shards.window(ids, works, key)
    laps.lap("draw")
    known: dict[int, tuple[Any, Any, int, Content]] = {}  # a message to many is measured once
    downs = []
    for info in infos:
        here = key.at(client=info.id, purpose="broadcast")
        sent = method.broadcast(problem, server, info, here)
        if id(sent) not in known:
            known[id(sent)] = (sent, *_transmit(sent, setting.precision))
        downs.append(known[id(sent)][1:])
    laps.lap("encode")
    states = [
        setting.store.load(info.id, first_state(method, problem, info, down, key))
        for info, (down, _, _) in zip(infos, downs, strict=True)
    ]
    laps.lap("state")
    prepared = []
    for client, (down, size, content), *own in zip(ids, downs, states, shards, strict=True):
        flops = setting.flops.count(down, *own)
        prepared.append(_Prepared(Task(client, (down, *own)), size, content, flops))
    laps.lap("count")
    return prepared


def first_state(
    method: AnyMethod, problem: Problem, info: ClientInfo, down: Any, key: Key
) -> Callable[[], Any]:
    """Return the maker of a client's first state; its key does not depend on the round."""

    def make() -> Any:
        first = Key(key.seed, client=info.id, purpose="client")
        return method.init_client(problem, info, down, first)

    return make


def _transmit(message: Any, precision: Precision) -> tuple[Any, int, Content]:
    """Return what the receiver sees of a message, its length, and what is in it.

    None is not sent at all.
    """
    if message is None:
        return None, 0, Content(0, 0.0, 0)
    return wire.rounded(message, precision), *wire.measured(message, precision)
