"""Client pools: the interface between the loop (`engine.training`) and the clients.

A pool owns data, client states, devices and transport. The loop owns the server state and the
record. Every request is answered once. The order of answers depends on the requests alone, not on
threads. Requests are read lazily. A result that was yielded is kept: the client's next round starts
from its new state. An exception before the first answer changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from parsifl.core.algorithm import AnyAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.engine.allocator import keep_freed_memory
from parsifl.engine.finite import has_diverged
from parsifl.engine.threads import Scope, thread_scope
from parsifl.wire import MessageStats

Json = dict[str, Any]


@dataclass(frozen=True)
class ClientRequest:
    """A request of the loop to one client. The pool provides state, data and device.

    Attributes
    ----------
    key
        Seed and round.
    message
        The downlink, as `broadcast` returned it.
    upload
        Whether the client uploads; the others only train.
    """

    client: ClientInfo
    key: Key
    message: Any
    upload: bool = True


@dataclass(frozen=True)
class ClientResult:
    """A client's result as the server sees it: values are rounded as in transmission.

    Attributes
    ----------
    largest
        The largest absolute value of the upload if it is unusually large, else 0.
    aggregated
        Whether the upload is part of a `PartialTotal`.
    """

    client: ClientInfo
    received: Any
    upload: Any
    metrics: Mapping[str, Any]
    down: MessageStats
    up: MessageStats
    flops: int | None = None
    notes: tuple[str, ...] = ()
    largest: float = 0.0
    aggregated: bool = False


@dataclass(frozen=True)
class ClientFailure:
    """A client that is dropped from the round; its state does not change."""

    client: ClientInfo
    reason: str
    down: MessageStats = field(default_factory=MessageStats)


@dataclass(frozen=True)
class PartialTotal:
    """A sum over several clients, computed elsewhere: on a worker, or by secure aggregation."""

    clients: int
    total: Any


@dataclass(frozen=True)
class ClientScores:
    """One client's metrics by model and split, and its number of rows by split.

    `reason` explains why there are none, if the client could not be evaluated.
    """

    client: ClientInfo
    samples: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""


Answer = ClientResult | ClientFailure | PartialTotal | ClientScores


@dataclass(frozen=True)
class PendingEvaluation:
    """The evaluation of an earlier round, deferred to the next call of `train`."""

    requests: Iterable[ClientRequest]
    server: Any


class ClientPool(Protocol):
    """Clients and everything that belongs to them."""

    @property
    def clients(self) -> Sequence[ClientInfo]:
        """All clients, by id."""
        ...

    @property
    def executor(self) -> str:
        """How clients run, for the record."""
        ...

    @property
    def deferred_evaluation(self) -> bool:
        """Whether the evaluation of a round may be deferred to the next call of `train`."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """The time that the last `train` spent, by phase; may be empty."""
        ...

    def train(
        self, requests: Iterable[ClientRequest], evaluation: PendingEvaluation | None = None
    ) -> Generator[Answer, None, None]:
        """Train clients; yield one answer per request, and scores if an evaluation is pending."""
        ...

    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        """Evaluate the global model and the personal models, without changing any state."""
        ...

    def save(self, directory: Path) -> Json:
        """Write the pool's part of a checkpoint; return what `restore` needs to find it."""
        ...

    def restore(self, directory: Path, saved: Json) -> None:
        """Restore the state of `save`; may be called more than once."""
        ...


@dataclass(frozen=True)
class ClientProgram:
    """The computation of a client in a round; every pool runs this."""

    algorithm: AnyAlgorithm
    problem: Problem

    def __post_init__(self) -> None:
        keep_freed_memory()  # here: simulations, workers and nodes all compute through a program

    @cached_property
    def scope(self) -> Scope:
        """The context in which clients and the server compute."""
        return thread_scope(self.problem)

    def __call__(self, received: Any, state: Any, data: ClientRoundData) -> ClientUpdate[Any, Any]:
        """Train one client."""
        with self.scope():
            return self.algorithm.client_update(self.problem, received, state, data)

    def compact(self, upload: Any) -> Any:
        """Return a client's upload as it is sent."""
        with self.scope():
            return self.algorithm.compact(self.problem, upload)

    def acknowledge(self, state: Any, upload: Any, arrived: Any) -> Any:
        """Return a client's next state after a lossy wire changed its upload."""
        with self.scope():
            return self.algorithm.acknowledge(self.problem, state, upload, arrived)

    def cause(self, fault: str, data: ClientRoundData, seed: int) -> str:
        """Return why a client diverged: its loss, if it is not finite before any step."""
        if not has_diverged(fault):
            return fault
        params = self.problem.init(Key(seed, purpose="server"))
        for batches in data.batches.values():
            if not len(batches):
                continue
            with self.scope(), torch.no_grad():
                loss = float(self.problem.loss(params, batches.batch(0)))
            if not math.isfinite(loss):
                return (
                    f"its loss is {loss} at the initial parameters already: check the loss (a "
                    "logarithm of 0, a division by 0) and the data"
                )
        return fault

    def initial_state(self, client: ClientInfo, received: Any, seed: int) -> Any:
        """Return a client's first state; its key does not depend on the round."""
        key = Key(seed, client=client.id, purpose="client")
        return self.algorithm.init_client(self.problem, client, received, key)
