"""One round: broadcast, local work, aggregation. The loop over clients is written here alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parsifl import tree, wire
from parsifl.algorithm import AnyMethod, ClientInfo, GatherAlgorithm, Local, Received
from parsifl.engine import executors
from parsifl.engine.executors import Executor, Task
from parsifl.engine.flops import FlopCounter
from parsifl.engine.network import Network
from parsifl.engine.shards import Shards
from parsifl.engine.store import ClientStore
from parsifl.keys import Key
from parsifl.problem import Problem
from parsifl.wire import Precision


@dataclass
class Ledger:
    """What a round cost and what happened in it."""

    trained: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dense_up: int = 0
    dense_down: int = 0
    flops: int | None = 0
    simulated_seconds: float = 0.0
    dropped: dict[int, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


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
    """Return the next server state and the ledger; clients are added up in the order of ids."""
    everyone = setting.method.trains == "everyone"
    training = setting.pool if everyone else cohort
    gathered = _Gathered(setting, set(cohort))
    started = time.perf_counter()
    for at in range(0, len(training), setting.window):
        _run_window(setting, server, training[at : at + setting.window], key, gathered)
    trained = time.perf_counter()
    server = gathered.aggregate(server, key.at(purpose="aggregate"))
    ledger = gathered.ledger
    ledger.seconds = {"local": trained - started, "aggregate": time.perf_counter() - trained}
    return server, ledger


def _run_window(
    setting: Setting, server: Any, ids: Sequence[int], key: Key, gathered: _Gathered
) -> None:
    prepared = list(_prepare(setting, server, ids, key))
    method, problem = setting.method, setting.problem

    def local(down: Any, client: Any, shard: Any) -> Local[Any, Any]:
        return method.local(problem, down, client, shard)

    tasks = [item.task for item in prepared]
    outcome = executors.run(local, tasks, setting.executor, setting.block)
    gathered.ledger.fallbacks += outcome.fallbacks
    for item in prepared:
        client = item.task.client
        if client in outcome.failures:
            gathered.drop(item, outcome.failures[client])
        else:
            gathered.receive(item, outcome.results[client])


def _prepare(setting: Setting, server: Any, ids: Sequence[int], key: Key) -> Iterator[_Prepared]:
    method, problem = setting.method, setting.problem
    known: dict[int, tuple[Any, Any, int]] = {}  # a message shared by many is measured once
    for client in ids:
        info = setting.infos[client]
        sent = method.broadcast(problem, server, info, key.at(client=client, purpose="broadcast"))
        if id(sent) not in known:
            known[id(sent)] = (sent, *_transmit(sent, setting.precision))
        _, down, size = known[id(sent)]
        state = setting.store.load(client, first_state(method, problem, info, down, key))
        shard = setting.shards.shard(client, method.work(info, key.round), key)
        flops = setting.flops.count(down, state, shard)
        yield _Prepared(Task(client, (down, state, shard)), size, flops)


def first_state(
    method: AnyMethod, problem: Problem, info: ClientInfo, down: Any, key: Key
) -> Callable[[], Any]:
    """Return the maker of a client's first state; its key does not depend on the round."""
    first = Key(key.seed, client=info.id, purpose="client")
    return lambda: method.init_client(problem, info, down, first)


def _transmit(message: Any, precision: Precision) -> tuple[Any, int]:
    """Return what the receiver sees of a message, and its length; None is not sent at all."""
    if message is None:
        return None, 0
    return wire.rounded(message, precision), wire.size(message, precision)


class _Gathered:
    """Collects what clients return, in the order of their ids."""

    def __init__(self, setting: Setting, cohort: set[int]) -> None:
        self.ledger = Ledger()
        self._setting, self._cohort = setting, cohort
        self._total: Any = None
        self._uploads: list[Received[Any]] = []
        self._arrived = 0
        self._info_weight = 0.0

    def drop(self, item: _Prepared, reason: str) -> None:
        """Leave a client out; its state stays old."""
        self.ledger.bytes_down += item.bytes_down
        self.ledger.dropped[item.task.client] = reason

    def receive(self, item: _Prepared, result: Local[Any, Any]) -> None:
        """Book, check and add up one client's result."""
        setting, client = self._setting, item.task.client
        bad = _first_not_finite(result)
        if bad:
            self.drop(item, f"{bad} is not finite")
            return
        self.ledger.trained += 1
        self.ledger.bytes_down += item.bytes_down
        if item.task.arguments[0] is not None:
            self.ledger.dense_down += wire.dense_size(item.task.arguments[0])
        up = self._upload(client, result) if client in self._cohort else 0
        self._count(item, up)
        setting.store.save(client, result.client)

    def _upload(self, client: int, result: Local[Any, Any]) -> int:
        setting, info = self._setting, self._setting.infos[client]
        upload, size = _transmit(result.upload, setting.precision)
        weight = setting.method.weight(info)
        if isinstance(setting.method, GatherAlgorithm):
            self._uploads.append(Received(info, weight, upload))
        else:
            method: Any = setting.method
            part = method.contribute(setting.problem, upload, weight)
            self._total = tree.accumulate(self._total, part)
        self._arrived += 1
        self.ledger.bytes_up += size
        self.ledger.dense_up += 0 if upload is None else wire.dense_size(upload)
        self._info_weight += weight
        for name, value in result.info.items():
            mean = self.ledger.info.get(name, 0.0)
            self.ledger.info[name] = mean + (float(value) - mean) * weight / self._info_weight
        return size

    def _count(self, item: _Prepared, up: int) -> None:
        ledger, profile = self.ledger, self._setting.infos[item.task.client].profile
        if ledger.flops is not None:
            ledger.flops = None if item.flops is None else ledger.flops + item.flops
        spent = self._setting.network.seconds(up, item.bytes_down, item.flops, profile)
        ledger.simulated_seconds = max(ledger.simulated_seconds, spent)

    def aggregate(self, server: Any, key: Key) -> Any:
        """Return the next server state; it stays as it is if nobody is left."""
        if not self._arrived:
            return server
        method: Any = self._setting.method
        gathers = isinstance(method, GatherAlgorithm)
        combined = self._uploads if gathers else self._total
        following = method.aggregate(self._setting.problem, server, combined, key)
        # as a checkpoint would give it back: the layout of memory may decide the last bit
        return tree.map(_contiguous, following)


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def _first_not_finite(result: Local[Any, Any]) -> str:
    for what, part in (("upload", result.upload), ("state", result.client), ("info", result.info)):
        leaves, structure = tree.flatten(part)
        for name, leaf in zip(tree.names(structure), leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not _finite(leaf):
                return f"{what} {name}"
    return ""


def _finite(leaf: Tensor) -> bool:
    # a finite sum proves finite terms in one pass; only an overflow needs the slow look
    return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())
