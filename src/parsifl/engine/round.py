"""One round: broadcast, local work, aggregation. The loop over clients is written here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from parsifl.engine.threads import one_core
from parsifl.errors import CapabilityError
from parsifl.keys import Key
from parsifl.problem import Problem, SupportSolvable
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
    flops: int | None


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
        prepared = list(_prepare(setting, server, training[at : at + setting.window], key, laps))
        _run_window(setting, prepared, uploading, gathered, laps)
    server = gathered.aggregate(server, key.at(purpose="aggregate"))
    laps.lap("aggregate")
    gathered.ledger.seconds = laps.seconds
    return server, gathered.ledger


def local_work(method: AnyMethod, problem: Problem) -> Callable[[Any, Any, Any], Local[Any, Any]]:
    """Return what a client does with downlink, state and shard, here and where it is deployed."""
    # a linear model gains a few percent from a second thread, and takes ten times as long where
    # that thread has to wait for a busy core (docs/adr/0004)
    scope = one_core if isinstance(problem, SupportSolvable) else nullcontext

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

    def book(outcome: Outcome) -> None:
        laps.lap("local")
        gathered.ledger.fallbacks += outcome.fallbacks
        with one_core():  # to wake another thread takes longer than to add up a small model
            for client in sorted({*outcome.results, *outcome.failures}):
                _book(setting, items[client], outcome, client in uploading, gathered, laps)

    before = torch.get_rng_state()
    tasks = [item.task for item in prepared]
    executors.run(local, tasks, setting.executor, setting.block, book)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise CapabilityError(
            "the model or the method draws random numbers of its own, so that the same seed would "
            "give other results: use parsifl.models.KeyedDropout (adapt puts it in place of "
            "nn.Dropout), or parsifl.keys.uniform"
        )
    laps.lap("local")


def _book(
    setting: Setting,
    item: _Prepared,
    outcome: Outcome,
    uploads: bool,
    gathered: Gathered,
    laps: Laps,
) -> None:
    client = item.task.client
    reason = outcome.failures.get(client)
    if reason is None and client not in outcome.finite:
        bad = first_not_finite(outcome.results[client])
        reason = f"{bad} is not finite" if bad else None
    if reason is not None:
        gathered.drop(client, item.bytes_down, reason)
        return
    result = outcome.results[client]
    laps.lap("check")
    arrival = _arrival(setting, item, result, uploads)
    laps.lap("encode")
    gathered.receive(arrival)
    laps.lap("aggregate")
    setting.store.save(client, result.client)
    laps.lap("state")


def _arrival(setting: Setting, item: _Prepared, result: Local[Any, Any], uploads: bool) -> Arrival:
    message = result.upload if uploads else None
    upload, size, content = _transmit(message, setting.precision)
    return Arrival(
        client=item.task.client,
        down=item.task.arguments[0],
        upload=upload,
        info=result.info,
        bytes_down=item.bytes_down,
        bytes_up=size,
        flops=item.flops,
        uploads=uploads,
        content=content,
    )


def _prepare(
    setting: Setting, server: Any, ids: Sequence[int], key: Key, laps: Laps
) -> Iterator[_Prepared]:
    method, problem = setting.method, setting.problem
    known: dict[int, tuple[Any, Any, int]] = {}  # a message shared by many is measured once
    for client in ids:
        info = setting.infos[client]
        sent = method.broadcast(problem, server, info, key.at(client=client, purpose="broadcast"))
        if id(sent) not in known:
            known[id(sent)] = (sent, *_transmit(sent, setting.precision)[:2])
        _, down, size = known[id(sent)]
        laps.lap("encode")
        state = setting.store.load(client, first_state(method, problem, info, down, key))
        laps.lap("state")
        shard = setting.shards.shard(client, method.work(info, key.round), key)
        laps.lap("draw")
        flops = setting.flops.count(down, state, shard)
        laps.lap("count")
        yield _Prepared(Task(client, (down, state, shard)), size, flops)


def first_state(
    method: AnyMethod, problem: Problem, info: ClientInfo, down: Any, key: Key
) -> Callable[[], Any]:
    """Return the maker of a client's first state; its key does not depend on the round."""
    first = Key(key.seed, client=info.id, purpose="client")
    return lambda: method.init_client(problem, info, down, first)


def _transmit(message: Any, precision: Precision) -> tuple[Any, int, Content]:
    """Return what the receiver sees of a message, its length, and what is in it.

    None is not sent at all.
    """
    if message is None:
        return None, 0, Content(0, 0.0, 0)
    return wire.rounded(message, precision), *wire.measured(message, precision)
