"""SGD with a look ahead for a block of clients (see `solvers.lookahead`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from parsifl import keys
from parsifl.solvers.fused.network import Network, Pass
from parsifl.solvers.fused.schedule import Leaf, Schedule, Step
from parsifl.solvers.fused.stage import Landing, add_product_

PARTS = 2


@dataclass(frozen=True)
class Route:
    """Everything about the steps that is no tensor."""

    network: Network
    lr: float
    ahead: float
    decay: float
    trained: tuple[str, ...]


@final
class AheadBlock:
    """Parameters w of all clients, and the points w - ahead * g(w) that they look at."""

    def __init__(self, route: Route, schedule: Schedule, tensors: Sequence[Leaf]) -> None:
        self._route, self._schedule = route, schedule
        named = zip(route.trained, tensors, strict=True)
        self._params = {name: schedule.owned(leaf) for name, leaf in named}
        self._ahead = {name: torch.empty_like(w) for name, w in self._params.items()}

    def walk(self) -> tuple[Tensor, ...]:
        """Take every step; returns the parameters in the order of the clients."""
        count = 0
        ways: tuple[Pass, ...] = ()
        for step in self._schedule:
            if step.clients != count:
                count, ways = step.clients, self._ways(step.clients)
            for part, way in enumerate(ways):
                way.run(_part(step, part))
        return self._schedule.restored([self._params[name] for name in self._route.trained])

    def _ways(self, count: int) -> tuple[Pass, ...]:
        """Return the way that looks ahead and the way that moves, for the first clients."""
        params = {name: w[:count] for name, w in self._params.items()}
        ahead = {name: point[:count] for name, point in self._ahead.items()}
        hosts = (_Look(self._route, params, ahead), _Move(self._route, params, ahead))
        return tuple(self._route.network.on(host) for host in hosts)


@final
@dataclass(frozen=True)
class _Look:
    """Takes the gradient at w: it leads to the point ahead."""

    route: Route
    params: dict[str, Tensor]
    ahead: dict[str, Tensor]

    def read(self, name: str) -> Tensor:
        """Return w."""
        return self.params[name]

    def landing(self, name: str) -> Landing:
        """Go from w to the point ahead."""
        return partial(self._land, self.params[name], self.ahead[name])

    def _land(self, w: Tensor, ahead: Tensor, left: Tensor, right: Tensor | None) -> None:
        torch.mul(w, 1 - self.route.ahead * self.route.decay, out=ahead)
        add_product_(ahead, left, right, -self.route.ahead)


@final
@dataclass(frozen=True)
class _Move:
    """Takes the gradient at the point ahead: it moves w."""

    route: Route
    params: dict[str, Tensor]
    ahead: dict[str, Tensor]

    def read(self, name: str) -> Tensor:
        """Return the point ahead."""
        return self.ahead[name]

    def landing(self, name: str) -> Landing:
        """Move w."""
        return partial(self._land, self.params[name], self.ahead[name])

    def _land(self, w: Tensor, ahead: Tensor, left: Tensor, right: Tensor | None) -> None:
        if self.route.decay:
            w.sub_(ahead, alpha=self.route.lr * self.route.decay)
        add_product_(w, left, right, -self.route.lr)


def _part(step: Step, number: int) -> Step:
    size = step.y.shape[1] // PARTS
    rows = slice(number * size, (number + 1) * size)
    key = None if step.key is None else keys.fold(step.key, number)
    return Step(step.clients, step.x[:, rows], step.y[:, rows], step.scale[:, rows], key)
