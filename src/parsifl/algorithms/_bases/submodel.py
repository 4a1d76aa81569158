"""Algorithms whose devices train submodels: narrow slices, a subset of networks, or some layers.

The server keeps the whole model. A device receives the submodel of its `SubmodelSpec`, trains the
blocks listed there, and uploads only these. The server averages each entry over the devices that
trained it; an entry that no device trained keeps its value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import NonNegative, Size, is_number
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.core.problem import Layered, Model, Params, Problem, Scalable
from parsifl.nn.ensemble import Ensemble, join, member_key, prefix
from parsifl.solvers.sgd import sgd

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SubmodelSpec:
    """The part of the model that a device receives and trains.

    Attributes
    ----------
    width
        The fraction of the channels of the network, or of each of the networks.
    members
        The networks that the device trains, where there are several.
    blocks
        The blocks of a network that the device trains, by number; None: all.
    """

    width: float = 1.0
    members: tuple[int, ...] = ()
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SubmodelServer:
    """The whole model, the distinct masks (sets of blocks), and the mask index of each device.

    `plan` has the objective values and bounds of the plan behind the masks, if there is one.
    """

    params: Params
    masks: tuple[tuple[int, ...], ...] = ()
    chosen: tuple[int, ...] = ()
    plan: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Submodel:
    """The parameters of a device's submodel, without a frozen head, and its spec."""

    params: Params
    spec: SubmodelSpec


@dataclass(frozen=True)
class SubmodelAveraging(
    LocalSgd,
    Weighted,
    AdditiveAlgorithm[Problem, SubmodelServer, Params, Submodel, Params, Mean],
):
    """Abstract base: devices train parts of a model, and the server averages entry by entry.

    Parameters
    ----------
    tune_epochs, tune_steps
        How long a device fine-tunes all of its parameters before it is evaluated, at the learning
        rate of the round; `tune_steps` is used instead of `tune_epochs` if above 0.
    """

    uniform_uploads: ClassVar[bool] = False

    tune_epochs: NonNegative | None = None
    tune_steps: Size = 0

    # ------------------------------------------------------------------ what algorithms differ in
    @abstractmethod
    def submodel(self, server: SubmodelServer, client: ClientInfo, key: Key) -> SubmodelSpec:
        """Return the submodel that this device trains in this round."""

    def networks(self) -> int:
        """Return how many narrow networks replace the model; 0: the model itself is trained."""
        return 0

    def freezes_head(self) -> bool:
        """Return whether the head keeps its initial value until fine-tuning and is not sent."""
        return False

    def slices(self) -> bool:
        """Return whether devices train slices of the model."""
        return False

    def deploys_full(self) -> bool:
        """Return whether devices receive, and are evaluated on, the full model."""
        return False

    # ------------------------------------------------------------------ server
    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> SubmodelServer:
        """Return the initial parameters, without masks."""
        return SubmodelServer(self._start(problem, key))

    def model(self, problem: Problem, server: SubmodelServer) -> Model:
        """Return the whole model."""
        count = self.networks()
        full = self._whole(problem, SubmodelSpec(1 / count, (0,)) if count else SubmodelSpec())
        return Model(full, server.params)

    def broadcast(
        self, problem: Problem, server: SubmodelServer, client: ClientInfo, key: Key
    ) -> Submodel:
        """Send the device's submodel."""
        spec = self.submodel(server, client, key)
        head = self._head(problem, spec)
        part = server.params if self.deploys_full() else self._part(problem, server.params, spec)
        return Submodel({name: part[name] for name in part if name not in head}, spec)

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Weight every entry that was trained."""
        if self.slices():
            return padded(upload, weight, scalable(problem).shapes())
        return Mean.of(upload, weight)

    def aggregate(
        self, problem: Problem, server: SubmodelServer, total: Mean, key: Key
    ) -> SubmodelServer:
        """Average every entry over the devices that trained it; the others keep their value."""
        return replace(server, params=merged(server.params, total))

    # ------------------------------------------------------------------ client
    def init_client(
        self, problem: Problem, client: ClientInfo, received: Submodel, key: Key
    ) -> Params:
        """Return the frozen head, which is the same for all devices and never sent."""
        hashable: Any = problem
        width = 1.0 if self.deploys_full() else received.spec.width
        return dict(_frozen_head(self, hashable, width, key.seed))

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Request the mini-batches of the fine-tuning."""
        steps, epochs = (self.tune_steps, None) if self.tune_steps else (None, self.tune_epochs)
        if not steps and not epochs:
            return DataRequest()
        return DataRequest({"tune": BatchSpec(self.batch_size, steps, epochs, self.last_batch)})

    def client_update(
        self, problem: Problem, received: Submodel, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train the blocks of the spec; the others get no gradient and are not sent."""
        names = self._trained(problem, received)
        if not names:
            return ClientUpdate(state, {})
        have = {**received.params, **state}
        if self.deploys_full():
            have = self._part(problem, have, received.spec)
        trained = sgd(
            self._view(problem, received.spec),
            {name: have[name] for name in names},
            data["train"],
            self.sgd(data.round),
            frozen={name: value for name, value in have.items() if name not in names},
        )
        return ClientUpdate(state, trained)

    def personalize(
        self, problem: Problem, received: Submodel, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every device on the received model, including the head, after fine-tuning."""
        spec = SubmodelSpec() if self.deploys_full() else received.spec
        full = self._whole(problem, spec)
        params = {**received.params, **state}
        if "tune" in data.batches:
            params = sgd(full, params, data["tune"], self.sgd(data.round))
        return Model(full, params)

    # ------------------------------------------------------------------ parts
    def _start(self, problem: Problem, key: Key) -> Params:
        """Initialize the whole model; a narrow network starts as a corner of a full one."""
        count = self.networks()
        if not count:
            return problem.init(key)
        shapes = None if count == 1 else narrowed(problem, 1 / count).shapes()
        drawn = {member: problem.init(member_key(key, member)) for member in range(count)}
        return join({i: corner(params, shapes) for i, params in drawn.items()})

    def _part(self, problem: Problem, params: Params, spec: SubmodelSpec) -> Params:
        """Return the parameters of a submodel."""
        if spec.width == 1.0 or spec.members:
            return params
        return corner(params, narrowed(problem, spec.width).shapes())

    def _view(self, problem: Problem, spec: SubmodelSpec) -> Problem:
        """Return the problem of the networks that a device trains."""
        one = problem if spec.width == 1.0 else narrowed(problem, spec.width)
        return Ensemble(one, spec.members) if spec.members else one

    def _whole(self, problem: Problem, spec: SubmodelSpec) -> Problem:
        """Return the problem that reads all parameters of a device."""
        everything = tuple(range(self.networks()))
        return self._view(problem, SubmodelSpec(spec.width, everything))

    def _head(self, problem: Problem, spec: SubmodelSpec) -> frozenset[str]:
        if not self.freezes_head():
            return frozenset()
        return frozenset(layered(self._whole(problem, spec)).head)

    def drawn_head(self, problem: Problem, width: float, key: Key) -> Params:
        """Return the head that a device of this width freezes; empty if it is trained."""
        spec = SubmodelSpec(width)
        head = self._head(problem, spec)
        if not head:
            return {}
        start = self._start(problem, key)
        part = start if self.networks() else self._part(problem, start, spec)
        return {name: part[name].clone() for name in sorted(head)}

    def blocks(self, problem: Problem) -> list[LayerGroup]:
        """Return the layers that masks select from: those of the body, and a trained head."""
        one = layered(problem)
        if self.freezes_head():
            return list(one.layer_groups)
        start = problem.init(Key(0))
        size = sum(start[name].numel() for name in one.head)
        return [*one.layer_groups, LayerGroup("head", tuple(one.head), size)]

    def _trained(self, problem: Problem, received: Submodel) -> list[str]:
        """Return the names of the parameters that the device trains."""
        spec = received.spec
        starts = tuple(prefix(member) for member in spec.members) or ("",)
        if spec.blocks is None:
            return [name for name in received.params if name.startswith(starts)]
        one = layered(problem if spec.width == 1.0 else narrowed(problem, spec.width))
        parts = [*(group.parameters for group in one.layer_groups), one.head]
        names = {name for index in spec.blocks for name in parts[index]}
        wanted = {start + name for start in starts for name in names}
        return [name for name in received.params if name in wanted]


@lru_cache(maxsize=8)
def _frozen_head(algorithm: SubmodelAveraging, problem: Problem, width: float, seed: int) -> Params:
    """Draw one head for all devices; it depends only on the seed and never changes."""
    return algorithm.drawn_head(problem, width, Key(seed))


def width_of(client: ClientInfo) -> float:
    """Return the width of a device, a fraction of the channels: the profile's entry, or 1.

    >>> width_of(ClientInfo(0, 10, {"width": 0.5})), width_of(ClientInfo(1, 10))
    (0.5, 1.0)
    """
    width = client.profile.get("width", 1.0)
    if not is_number(width) or not 0 < width <= 1:
        raise ConfigError(
            f"the width of client {client.id} is {width!r}; a width is a number above 0, at most 1"
        )
    return float(width)


def corner(params: Params, shapes: Shapes | None) -> Params:
    """Return the leading slice of every parameter; None returns the parameters unchanged.

    >>> corner({"w": torch.arange(6).reshape(2, 3)}, {"w": (1, 2)})["w"]
    tensor([[0, 1]])
    """
    if shapes is None:
        return params
    return {name: _corner(value, shapes[name]).clone() for name, value in params.items()}


def _corner(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value[tuple(slice(0, size) for size in shape)]


def padded(upload: Params, weight: float, shapes: Shapes) -> Mean:
    """Return one device's summand in the full shapes: missing entries have weight 0."""
    total, weights = {}, {}
    for name, value in upload.items():
        total[name], weights[name] = value.new_zeros(shapes[name]), value.new_zeros(shapes[name])
        _corner(total[name], tuple(value.shape)).copy_(value)
        _corner(weights[name], tuple(value.shape)).fill_(weight)
    return Mean(tree.Scaled(weight, total), weights)


def merged(params: Params, total: Mean) -> Params:
    """Replace every entry that some device trained by its weighted mean."""
    return {
        name: torch.where(total.weight[name] > 0, total.total[name] / total.weight[name], value)
        if name in total.total
        else value
        for name, value in params.items()
    }


def narrowed(problem: Problem, width: float) -> Scalable:
    """Return the problem at a fraction of its width."""
    return scalable(problem).narrow(width)


def scalable(problem: Problem) -> Scalable:
    """Return the problem if it has widths."""
    if not isinstance(problem, Scalable):
        raise CapabilityError(f"{type(problem).__name__} is not Scalable: it has only one width")
    return problem


def layered(problem: Problem) -> Layered:
    """Return the problem if it has blocks and a head."""
    if not isinstance(problem, Layered):
        raise CapabilityError(f"{type(problem).__name__} is not Layered: it has no blocks to mask")
    return problem


def members_for(client: ClientInfo, networks: int, key: Key) -> tuple[int, ...]:
    """Assign the networks cyclically, in an order that is shuffled every round.

    A device of width r trains floor(r * networks) of them, at least one. Devices with consecutive
    ids start at consecutive positions, so every network is trained if there are enough devices.

    >>> members_for(ClientInfo(3, 10), 4, Key(0))
    (0, 1, 2, 3)
    >>> len(members_for(ClientInfo(3, 10, {"width": 0.5}), 4, Key(0)))
    2
    """
    # 0.1 * 30 is a little above 3 in floating point, 0.7 * 10 a little below 7
    count = max(1, int(round(width_of(client) * networks, 9)))
    deck = (
        Key(key.seed, round=key.round, purpose="splitmix").numpy_generator().permutation(networks)
    )
    return tuple(sorted(int(deck[(client.id + card) % networks]) for card in range(count)))
