"""Devices that work on parts of one model: narrow slices, some networks of several, some layers.

The server keeps the whole model. A device gets the part that its form says, trains the blocks
that its form says, and uploads just these. The server averages each entry over the devices that
trained it; what nobody trained keeps its value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.algorithms._bases.width_slices import (
    corner,
    layered,
    merged,
    narrowed,
    padded,
    scalable,
)
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import NonNegative, Size
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.nn.ensemble import Ensemble, join, member_key, prefix
from parsifl.solvers.sgd import SgdConfig, sgd


@dataclass(frozen=True)
class Form:
    """What a device works on.

    Attributes
    ----------
    width
        The fraction of the channels that its network (or each of its networks) has.
    members
        The networks that it trains, where there are several.
    blocks
        The blocks of a network that it trains, by number; None: all.
    """

    width: float = 1.0
    members: tuple[int, ...] = ()
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fleet:
    """The whole model, and which of the masks (sets of blocks) each device has."""

    params: Params
    masks: tuple[tuple[int, ...], ...] = ()
    chosen: tuple[int, ...] = ()


@dataclass(frozen=True)
class FormMessage:
    """A device's part of the model, without a frozen head, and its form."""

    params: Params
    form: Form


@dataclass(frozen=True)
class FormedMean(LocalSgd, AdditiveAlgorithm[Problem, Fleet, Params, FormMessage, Params, Mean]):
    """Abstract base: devices train parts of a model, and the server averages entry by entry.

    Parameters
    ----------
    weighting
        Whether uploads are weighed by training rows or equally.
    tune_epochs, tune_steps
        How long a device fine-tunes all of its parameters before it is judged, at the learning
        rate of the round; `tune_epochs` is used instead of `tune_steps` if given.
    """

    weighting: Literal["samples", "uniform"] = "samples"
    tune_epochs: NonNegative | None = None
    tune_steps: Size = 0

    # ------------------------------------------------------------------ what methods differ in
    @abstractmethod
    def form(self, server: Fleet, info: ClientInfo, key: Key) -> Form:
        """Return the part of the model that this device works on in this round."""

    def networks(self) -> int:
        """Return how many narrow networks take the place of the model; 0: the model it is."""
        return 0

    def freezes_head(self) -> bool:
        """Tell whether the head stays as it was drawn, unsent, until the fine-tuning."""
        return False

    def slices(self) -> bool:
        """Tell whether devices have slices of the model."""
        return False

    # ------------------------------------------------------------------ server
    def weight(self, client: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(client.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Fleet:
        """Start from the initial parameters, without masks."""
        return Fleet(self._start(problem, key))

    def model(self, problem: Problem, server: Fleet) -> Model:
        """Return the whole model."""
        count = self.networks()
        whole = self._judged(problem, Form(1 / count, (0,)) if count else Form())
        return Model(whole, server.params)

    def broadcast(
        self, problem: Problem, server: Fleet, client: ClientInfo, key: Key
    ) -> FormMessage:
        """Send the device's part of the model."""
        form = self.form(server, client, key)
        head = self._head(problem, form)
        part = self._part(problem, server.params, form)
        return FormMessage({name: part[name] for name in part if name not in head}, form)

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Weigh every entry that was trained."""
        if self.slices():
            return padded(upload, weight, scalable(problem).shapes())
        return Mean.of(upload, weight)

    def aggregate(self, problem: Problem, server: Fleet, total: Mean, key: Key) -> Fleet:
        """Average every entry over the devices that trained it; the others keep their value."""
        return Fleet(merged(server.params, total), server.masks, server.chosen)

    # ------------------------------------------------------------------ client
    def init_client(
        self, problem: Problem, client: ClientInfo, received: FormMessage, key: Key
    ) -> Params:
        """Draw the frozen head, which is the same for everybody and never sent."""
        hashable: Any = problem
        return dict(_frozen_head(self, hashable, received.form.width, key.seed))

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read the mini-batches of the fine-tuning."""
        if not (self.tune_steps if self.tune_epochs is None else self.tune_epochs):
            return DataRequest()
        steps = self.tune_steps if self.tune_epochs is None else None
        draw = BatchSpec(
            self.batch_size, steps=steps, epochs=self.tune_epochs, last_batch=self.last_batch
        )
        return DataRequest({"tune": draw})

    def client_update(
        self, problem: Problem, received: FormMessage, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train the blocks of the form; the others get no weight gradient and are not sent."""
        names = self._trained(problem, received)
        if not names:
            return ClientUpdate(state, {})
        have = {**received.params, **state}
        trained = sgd(
            self._view(problem, received.form),
            {name: have[name] for name in names},
            data["train"],
            self.sgd(data.round),
            frozen={name: value for name, value in have.items() if name not in names},
        )
        return ClientUpdate(state, trained)

    def personalize(
        self, problem: Problem, received: FormMessage, state: Params, data: ClientRoundData
    ) -> Model:
        """Judge every device on all that it has, head included, after fine-tuning."""
        judged = self._judged(problem, received.form)
        params = {**received.params, **state}
        if "tune" in data.batches:
            rate = self.learning_rate(data.round)
            params = sgd(
                judged, params, data["tune"], SgdConfig(rate, self.momentum, self.weight_decay)
            )
        return Model(judged, params)

    # ------------------------------------------------------------------ parts
    def _start(self, problem: Problem, key: Key) -> Params:
        """Draw the whole model; a narrow network starts as a corner of a full one."""
        count = self.networks()
        if not count:
            return problem.init(key)
        shapes = None if count == 1 else narrowed(problem, 1 / count).shapes()
        drawn = {member: problem.init(member_key(key, member)) for member in range(count)}
        return join({i: corner(params, shapes) for i, params in drawn.items()})

    def _part(self, problem: Problem, params: Params, form: Form) -> Params:
        """Return what a device of this form has of the model."""
        if form.width == 1.0 or form.members:
            return params
        return corner(params, narrowed(problem, form.width).shapes())

    def _view(self, problem: Problem, form: Form) -> Problem:
        """Return the problem of the networks that a device trains."""
        one = problem if form.width == 1.0 else narrowed(problem, form.width)
        return Ensemble(one, form.members) if form.members else one

    def _judged(self, problem: Problem, form: Form) -> Problem:
        """Return the problem that reads all that a device has."""
        everything = tuple(range(self.networks()))
        return self._view(problem, Form(form.width, everything))

    def _head(self, problem: Problem, form: Form) -> frozenset[str]:
        if not self.freezes_head():
            return frozenset()
        return frozenset(layered(self._judged(problem, form)).head)

    def drawn_head(self, problem: Problem, width: float, key: Key) -> Params:
        """Return the head that a device of this width freezes; empty if it is trained."""
        form = Form(width)
        head = self._head(problem, form)
        if not head:
            return {}
        start = self._start(problem, key)
        part = start if self.networks() else self._part(problem, start, form)
        return {name: part[name].clone() for name in sorted(head)}

    def _trained(self, problem: Problem, down: FormMessage) -> list[str]:
        """Return the names of the parameters that the device trains."""
        form = down.form
        starts = tuple(prefix(member) for member in form.members) or ("",)
        if form.blocks is None:
            return [name for name in down.params if name.startswith(starts)]
        one = layered(problem if form.width == 1.0 else narrowed(problem, form.width))
        own = {name for index in form.blocks for name in one.layer_groups[index].parameters}
        own |= set(() if self.freezes_head() else one.head)
        wanted = {start + name for start in starts for name in own}
        return [name for name in down.params if name in wanted]


@lru_cache(maxsize=8)
def _frozen_head(method: FormedMean, problem: Problem, width: float, seed: int) -> Params:
    """Draw a head once for all devices: it follows from the seed, and nobody ever changes it."""
    return method.drawn_head(problem, width, Key(seed))
