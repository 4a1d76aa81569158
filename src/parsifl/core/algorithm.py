"""The contract: what a federated algorithm is.

An algorithm is a frozen, final dataclass. Its fields are the configuration and its methods are
pure: state comes in as an argument and leaves as a return value. Four kinds of data are kept
apart, each a tree (see `parsifl.core.tree`) of a type that the class names:

==========  =======================================================  =========================
server      what the server keeps between rounds                     `init_server`, `aggregate`
client      what a client keeps between rounds (None: nothing)       `init_client`, `local`
downlink    what the server sends to a client                        `broadcast`
uplink      what a client sends to the server                        `local`
==========  =======================================================  =========================

`local` and `personalize` are written for one client and may run for many at once under
`torch.func.vmap`, so in them: no `.item()`, no `if` on a tensor, no random call but
`keys.uniform(shard.key, ...)`, no construction of modules. Everything else is plain Python.

A toy: clients report the mean of their targets, the server keeps the weighted mean::

    @final
    @dataclass(frozen=True)
    class MeanTarget(Averaging[Problem, None]):
        def work(self, info, round):
            return Work(rows=True)

        def local(self, problem, down, client, shard):
            return Local(None, {"mean": shard.all_rows().y.mean()})
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from torch import Tensor

from parsifl.core import config
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import OFFERED_BY, Model, Problem

P = TypeVar("P", bound=Problem, contravariant=True)
S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")
R = TypeVar("R")


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client.

    Attributes
    ----------
    id
        A dense index 0 .. N-1.
    samples
        The number of training rows.
    profile
        The device: JSON values such as width, budget, epochs, flops_per_second.
    """

    id: int
    samples: int
    profile: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate(Generic[C, U]):
    """The outcome of local work: new client state, the upload, and scalars for the record."""

    state: C
    upload: U
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpload(Generic[U]):
    """An upload with its sender."""

    client: ClientInfo
    weight: float
    value: U


class FederatedAlgorithm(ABC, Generic[P, S, C, D, U]):
    """What every algorithm has, whichever way its uploads are combined."""

    requires: ClassVar[tuple[type[Any], ...]] = ()
    """Capabilities of the problem (protocols of `parsifl.core.problem`) without which it cannot run."""
    trains: ClassVar[Literal["cohort", "everyone"]] = "cohort"
    """"everyone": all clients train in each round, and only the cohort uploads."""
    cites: ClassVar[str] = ""
    """The paper."""

    def __post_init__(self) -> None:
        config.check(self)
        self.check()

    def check(self) -> None:
        """Refuse settings that cannot work together; raise ConfigError."""

    # ------------------------------------------------------------------ server
    @abstractmethod
    def init_server(self, problem: P, clients: Sequence[ClientInfo], key: Key) -> S:
        """Return the server's state before the first round."""

    @abstractmethod
    def broadcast(self, problem: P, server: S, client: ClientInfo, key: Key) -> D:
        """Return what this client is sent: a cheap lookup, repeatable (it also serves judging)."""

    def weight(self, client: ClientInfo) -> float:
        """Return the weight of this client's upload."""
        return float(client.samples)

    def model(self, problem: P, server: S) -> Model | None:
        """Return the global model; None if the method has none."""
        return None

    # ------------------------------------------------------------------ client
    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Return which data `client_update` reads in this round."""
        return DataRequest()

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Say which data `personalize` reads."""
        return DataRequest()

    def init_client(self, problem: P, client: ClientInfo, received: D, key: Key) -> C:
        """Return a client's first state. Algorithms without client state inherit this."""
        return cast(C, None)

    @abstractmethod
    def client_update(
        self, problem: P, received: D, state: C, data: ClientRoundData
    ) -> ClientUpdate[C, U]:
        """Do one round of local work."""

    @abstractmethod
    def personalize(self, problem: P, received: D, state: C, data: ClientRoundData) -> Model:
        """Return the model that this client is judged on."""


class AdditiveAlgorithm(FederatedAlgorithm[P, S, C, D, U], Generic[P, S, C, D, U, R]):
    """A method whose server needs only a sum over the uploads."""

    @abstractmethod
    def contribute(self, problem: P, upload: U, weight: float) -> R:
        """Turn one upload into its summand (it may alias the upload; the sum owns its memory)."""

    @abstractmethod
    def aggregate(self, problem: P, server: S, total: R, key: Key) -> S:
        """Return the next server state from the sum over the clients that arrived."""


class GatherAlgorithm(FederatedAlgorithm[P, S, C, D, U]):
    """A method whose server needs every upload at once, ordered by client id."""

    @abstractmethod
    def aggregate(self, problem: P, server: S, uploads: Sequence[ClientUpload[U]], key: Key) -> S:
        """Return the next server state from all uploads that arrived."""


AnyAlgorithm = FederatedAlgorithm[Any, Any, Any, Any, Any]


def require(method: AnyAlgorithm, problem: Problem) -> None:
    """Raise CapabilityError if the problem lacks something that the method requires."""
    for capability in method.requires:
        if not isinstance(problem, capability):
            missing = lacking(problem, capability)
            remedy = f"; use {OFFERED_BY[capability]}" if capability in OFFERED_BY else ""
            raise CapabilityError(
                f"{type(method).__name__} needs a problem that is {capability.__name__}; "
                f"{type(problem).__name__} lacks {', '.join(missing)}{remedy}"
            )


def lacking(problem: Any, capability: type[Any]) -> list[str]:
    """Name the members that a problem would need to be of this kind."""
    return [name for name in sorted(_members(capability)) if not hasattr(problem, name)]


def _members(protocol: type[Any]) -> set[str]:
    members: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            members |= {name for name in vars(base) if not name.startswith("_")}
    return members


@dataclass(frozen=True)
class TreeTypes:
    """The types of a method's four trees, read from its type hints."""

    server: Any
    client: Any
    down: Any
    upload: Any


def message_types(method: AnyAlgorithm) -> TreeTypes:
    """Return the types of the four trees: decoding takes classes from here, never from data."""
    kind = type(method)

    def returned(function: str) -> Any:
        hints = typing.get_type_hints(getattr(kind, function))
        if "return" not in hints:
            raise ConfigError(
                f"{kind.__name__}.{function} needs a return annotation, for example "
                "-> Local[None, Params]: messages and checkpoints are read by it"
            )
        return hints["return"]

    client, upload = typing.get_args(returned("client_update"))
    return TreeTypes(returned("init_server"), client, returned("broadcast"), upload)
