"""The contract of a federated algorithm.

An algorithm is a frozen, final dataclass. Its fields are the settings and its methods are pure:
state comes in as an argument and leaves as a return value. Four kinds of data are kept apart, each
a tree (see `parsifl.core.tree`) of a type that the class declares:

==========  =======================================================  ==============================
server      what the server keeps between rounds                     `init_server`, `aggregate`
client      what a client keeps between rounds (None: nothing)       `init_client`, `client_update`
downlink    what the server sends to a client                        `broadcast`
uplink      what a client sends to the server                        `client_update`
==========  =======================================================  ==============================

An additive algorithm implements six methods, a gathering one five, and one that derives from
`Averaging` a single one. `client_update` and `personalize` are written for one client and may run
for many at once under `torch.func.vmap`. They must not call `.item()`, branch on a tensor, build
modules, or draw random numbers other than through `keys.uniform(data.key, ...)`.

Example: clients report the mean of their targets, and the server keeps the weighted mean::

    @final
    @dataclass(frozen=True)
    class MeanTarget(Averaging[Problem, None]):
        def batches(self, client, round):
            return DataRequest(rows=True)

        def client_update(self, problem, received, state, data) -> ClientUpdate[None, Params]:
            return ClientUpdate(None, {"mean": data.all_rows().y.mean()})
"""

from __future__ import annotations

import difflib
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from torch import Tensor

from parsifl.core import config, tree
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import OFFERED_BY, Model, Problem, buffer_names, local_buffers

P = TypeVar("P", bound=Problem, contravariant=True)
S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")
T = TypeVar("T")


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows about a client.

    Attributes
    ----------
    id
        A dense index 0 .. N-1.
    samples
        The number of training rows.
    profile
        The device: JSON values such as width, budget, epochs, flops_per_second.
    takes_part
        Whether the client may be sampled; False for clients that are held out of training.
    """

    id: int
    samples: int
    profile: Mapping[str, Any] = field(default_factory=dict)
    takes_part: bool = True


def check_profile(client: int, profile: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Reject misspelt entries of a device profile.

    Others may be for another algorithm, and cause a warning only (`unread_entries`).
    """
    for name in profile:
        if not isinstance(name, str):
            raise ConfigError(
                f"the profile of client {client} has the entry {name!r}; names are strings, "
                "such as 'budget'"
            )
        near = difflib.get_close_matches(name.lower(), fields, n=1, cutoff=0.8)
        if near and name not in fields:
            raise ConfigError(
                f"the profile of client {client} has '{name}'; did you mean '{near[0]}'?"
            )


def unread_entries(
    algorithm: FederatedAlgorithm[Any, Any, Any, Any, Any, Any],
    profiles: Iterable[Mapping[str, Any]],
) -> str:
    """Return a sentence about entries that the algorithm does not read; "" if there are none."""
    read = {"flops_per_second", *algorithm.profile_fields()}  # the first is for cost estimates
    unread = sorted({name for profile in profiles for name in profile} - read)
    if not unread:
        return ""
    return (
        f"{algorithm.title()} does not read {', '.join(unread)} of the device profiles; "
        f"it reads {', '.join(sorted(read))}"
    )


def participants(clients: Sequence[ClientInfo]) -> int:
    """Return the number of clients that may be sampled: N of the papers."""
    return sum(client.takes_part for client in clients)


@dataclass(frozen=True)
class ClientUpdate(Generic[C, U]):
    """The result of a client's round: its next state, its upload, and scalars for the record."""

    state: C
    upload: U
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpload(Generic[U]):
    """An upload with its sender, its weight, and what the sender had received."""

    client: ClientInfo
    weight: float
    value: U
    received: Any = None


class Accumulator(Protocol[U, T]):
    """Combines the uploads of one round, in the order given."""

    @property
    def mergeable(self) -> bool:
        """Whether partial totals may be merged, so that workers can sum independently."""
        ...

    def add(self, upload: ClientUpload[U]) -> None:
        """Add one upload."""
        ...

    def merge(self, total: T) -> None:
        """Add the total of another accumulator."""
        ...

    def total(self) -> T:
        """Return what `aggregate` reads."""
        ...


@dataclass(frozen=True)
class TreeTypes:
    """The types of the four trees. Decoders take classes from here, never from data."""

    server: Any
    client: Any
    downlink: Any
    uplink: Any


@dataclass(frozen=True)
class Conformance:
    """Input of the conformance suite: settings to test with, and exemptions with reasons."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """Settings that belong together.

    Attributes
    ----------
    settings
        Values of fields; the others keep their defaults.
    source
        Where the settings come from: section or table of the paper, or a measurement.
    run
        What the source fixes besides the settings: clients, participation, rounds, model.
    """

    settings: Mapping[str, Any]
    source: str
    run: str = ""


class FederatedAlgorithm(ABC, Generic[P, S, C, D, U, T]):
    """Base of all algorithms, however their uploads are combined."""

    cites: ClassVar[str] = ""
    """The paper."""
    requires: ClassVar[tuple[type[Any], ...]] = ()
    """Capabilities (protocols of `parsifl.core.problem`) that the problem must have."""
    supports_buffers: ClassVar[bool] = False
    """Whether the algorithm separates leaves that the forward pass updates (running statistics).

    They may be averaged, but duals, thresholds and other arithmetic must not touch them (see
    `parsifl.core.problem.split_buffers`).
    """
    keeps_buffers_local: ClassVar[bool] = False
    """Whether buffers never leave the clients."""
    uniform_uploads: ClassVar[bool] = True
    """Whether all clients upload the same leaves in the same shapes; False for submodels."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Settings by name: "paper:<data>" for those of the paper (`get(..., preset=...)`)."""
    conformance: ClassVar[Conformance] = Conformance()
    """Settings and exemptions for the conformance suite."""

    if not typing.TYPE_CHECKING:  # editors and type checkers see the fields only

        def __new__(cls, *_: Any, **settings: Any) -> Any:
            """Reject names that are not settings before the dataclass does, with a suggestion."""
            config.check_names(cls, settings)
            cls.check_given(settings)
            return super().__new__(cls)

    @classmethod
    def check_given(cls, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for settings that must not be given together, by keyword."""

    def __post_init__(self) -> None:
        config.check(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work together."""

    # ------------------------------------------------------------------ server
    @abstractmethod
    def init_server(self, problem: P, clients: Sequence[ClientInfo], key: Key) -> S:
        """Return the server's state before the first round."""

    @abstractmethod
    def broadcast(self, problem: P, server: S, client: ClientInfo, key: Key) -> D:
        """Return the message to this client. Evaluation calls it again, so keep it cheap."""

    @abstractmethod
    def accumulator(self, problem: P) -> Accumulator[U, T]:
        """Return an empty accumulator. `AdditiveAlgorithm` and `GatherAlgorithm` implement it."""

    @abstractmethod
    def aggregate(self, problem: P, server: S, total: T, key: Key) -> S:
        """Return the next server state from the total over the uploads that arrived."""

    def weight(self, client: ClientInfo) -> float:
        """Return the weight of this client's upload."""
        return float(client.samples)

    def model(self, problem: P, server: S) -> Model | None:
        """Return the global model; None if the algorithm has none."""
        return None

    # ------------------------------------------------------------------ client
    @abstractmethod
    def client_update(
        self, problem: P, received: D, state: C, data: ClientRoundData
    ) -> ClientUpdate[C, U]:
        """Train one client for one round."""

    @abstractmethod
    def personalize(self, problem: P, received: D, state: C, data: ClientRoundData) -> Model:
        """Return the model that this client is evaluated on."""

    def init_client(self, problem: P, client: ClientInfo, received: D, key: Key) -> C:
        """Return a client's first state. Algorithms without client state inherit this."""
        return cast(C, None)

    def compact(self, problem: P, upload: U) -> U:
        """Return an equal upload that is shorter to send, such as with leaves as factors.

        Called for one client at a time, outside vmap: shapes may depend on values.
        """
        return upload

    def acknowledge(self, problem: P, state: C, upload: U, arrived: U) -> C:
        """Return the client's next state if a lossy wire rounded its upload to `arrived`.

        Override it if the server mirrors client state.
        """
        return state

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Return which data `client_update` reads in this round."""
        return DataRequest()

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Return which data `personalize` reads."""
        return DataRequest()

    # ------------------------------------------------------------------ declared, rarely overridden
    def everyone_trains(self) -> bool:
        """Return whether clients outside the cohort train too; they do not upload."""
        return False

    def needs_every_upload(self) -> bool:
        """Return whether the server reads single uploads, not only a sum over them."""
        return False

    def learning_rate(self, round: int) -> float | None:
        """Return the learning rate of a round, which fine-tuning falls back to."""
        return None

    def profile_fields(self) -> tuple[str, ...]:
        """Return the entries of a device profile that this algorithm reads."""
        return ()

    def start_metrics(self, server: S) -> Mapping[str, float]:
        """Return scalars of the first server state for the record of the first round."""
        return {}

    def title(self) -> str:
        """Return the name for messages."""
        return type(self).__name__

    def describe(self) -> dict[str, Any]:
        """Return the name and the settings as JSON values, for the configuration of a run."""
        return {"name": type(self).__name__.lower(), **config.to_json(self)}

    def check_capabilities(self, problem: Problem) -> None:
        """Raise CapabilityError if the problem lacks something that the algorithm requires."""
        for capability in self.requires:
            if not isinstance(problem, capability):
                missing = lacking(problem, capability)
                remedy = f"; use {OFFERED_BY[capability]}" if capability in OFFERED_BY else ""
                raise CapabilityError(
                    f"{type(self).__name__} needs a problem that is {capability.__name__}; "
                    f"{type(problem).__name__} lacks {', '.join(missing)}{remedy}"
                )
        buffers = sorted(buffer_names(problem))
        if buffers and not self.supports_buffers:
            raise CapabilityError(
                f"{type(self).__name__} does not support running statistics ({buffers[0]}, ...): "
                "use NeuralProblem(module, buffers='batch'), parsifl.models.adapt(module, "
                "norm='group'), or an algorithm that does (fedavg, fedprox, ditto, fedslr, local)"
            )
        if buffers and local_buffers(problem) and not self.keeps_buffers_local:
            raise CapabilityError(
                f"{type(self).__name__} would send the buffers of a problem with buffers='local': "
                "only parsifl.simulate keeps them on the clients; use buffers='average' here"
            )

    def tree_types(self) -> TreeTypes:
        """Return the types of the four trees, read from the return annotations."""
        client, uplink = typing.get_args(self._returned("client_update"))
        return TreeTypes(self._returned("init_server"), client, self._returned("broadcast"), uplink)

    def _returned(self, function: str) -> Any:
        kind = type(self)
        hints = typing.get_type_hints(getattr(kind, function))
        if "return" not in hints:
            raise ConfigError(
                f"{kind.__name__}.{function} needs a return annotation, for example "
                "-> ClientUpdate[None, Params]: it determines how messages and checkpoints are read"
            )
        return hints["return"]


class AdditiveAlgorithm(FederatedAlgorithm[P, S, C, D, U, T]):
    """An algorithm whose server needs only a sum over the uploads."""

    @abstractmethod
    def contribute(self, problem: P, upload: U, weight: float) -> T:
        """Return the summand of one upload. It may alias the upload; the sum owns its memory."""

    def accumulator(self, problem: P) -> Accumulator[U, T]:
        """Return a running sum."""
        return SumAccumulator(self, problem)


class GatherAlgorithm(FederatedAlgorithm[P, S, C, D, U, Sequence[ClientUpload[U]]]):
    """An algorithm whose server needs every upload at once, ordered by client id."""

    def accumulator(self, problem: P) -> Accumulator[U, Sequence[ClientUpload[U]]]:
        """Return a list of uploads."""
        return ListAccumulator()

    def needs_every_upload(self) -> bool:
        """Return True."""
        return True


class SumAccumulator(Generic[U, T]):
    """A running sum. It keeps no upload, so that the pool reuses the memory of its blocks."""

    mergeable = True

    def __init__(
        self, algorithm: AdditiveAlgorithm[Any, Any, Any, Any, U, T], problem: Any
    ) -> None:
        self._algorithm, self._problem = algorithm, problem
        self._sum: Any = None

    def add(self, upload: ClientUpload[U]) -> None:
        """Add the summand of one upload."""
        self.merge(self._algorithm.contribute(self._problem, upload.value, upload.weight))

    def merge(self, total: T) -> None:
        """Add the total of another accumulator."""
        self._sum = tree.accumulate(self._sum, total)

    def total(self) -> T:
        """Return the sum."""
        return cast(T, canonical(self._sum))


class ListAccumulator(Generic[U]):
    """Keeps every upload."""

    mergeable = False

    def __init__(self) -> None:
        self._uploads: list[ClientUpload[U]] = []

    def add(self, upload: ClientUpload[U]) -> None:
        """Keep an upload."""
        value = canonical(upload.value)
        stored = ClientUpload(upload.client, upload.weight, value, upload.received)
        self._uploads.append(stored)

    def merge(self, total: Sequence[ClientUpload[U]]) -> None:
        """Keep the uploads of another accumulator."""
        self._uploads.extend(total)

    def total(self) -> Sequence[ClientUpload[U]]:
        """Return all uploads, ordered by client id."""
        return sorted(self._uploads, key=lambda upload: upload.client.id)


def canonical(value: Any) -> Any:
    """Return a tree in contiguous memory, as if it were read from a checkpoint or message.

    The memory layout can affect the last bit of a product.
    """
    return tree.map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, value)


AnyAlgorithm = FederatedAlgorithm[Any, Any, Any, Any, Any, Any]


def lacking(problem: Any, capability: type[Any]) -> list[str]:
    """Return the members that a problem would need to have a capability."""
    return [name for name in sorted(_members(capability)) if not hasattr(problem, name)]


def _members(protocol: type[Any]) -> set[str]:
    members: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            members |= {name for name in vars(base) if not name.startswith("_")}
    return members
