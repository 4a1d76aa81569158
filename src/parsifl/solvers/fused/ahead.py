"""SGD with a look ahead for a block of clients (see `solvers.lookahead`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from parsifl import keys
from parsifl.solvers.fused.kernel import add_product_
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Leaf, Schedule, Step

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
        self._count, self._looking = 0, True

    def walk(self) -> tuple[Tensor, ...]:
        """Take every step; returns the parameters in the order of the clients."""
        way = self._route.network.on(self)
        for step in self._schedule:
            self._count = step.clients
            for part, looking in enumerate((True, False)):
                self._looking = looking
                way.run(_part(step, part))
        return self._schedule.restored([self._params[name] for name in self._route.trained])

    def read(self, name: str) -> Tensor:
        """Return a weight at the point where the gradient is taken."""
        return (self._params if self._looking else self._ahead)[name][: self._count]

    def wants(self, name: str) -> bool:  # noqa: ARG002 - the protocol names it
        """All parameters are trained."""
        return True

    def land(self, name: str, left: Tensor, right: Tensor | None) -> None:
        """Look ahead from w, or move w by the gradient that was found there."""
        route, w = self._route, self._params[name][: self._count]
        ahead = self._ahead[name][: self._count]
        if self._looking:
            torch.mul(w, 1 - route.ahead * route.decay, out=ahead)
            add_product_(ahead, left, right, -route.ahead)
        else:
            if route.decay:
                w.sub_(ahead, alpha=route.lr * route.decay)
            add_product_(w, left, right, -route.lr)


def _part(step: Step, number: int) -> Step:
    size = step.y.shape[1] // PARTS
    rows = slice(number * size, (number + 1) * size)
    key = None if step.key is None else keys.fold(step.key, number)
    return Step(step.clients, step.x[:, rows], step.y[:, rows], step.scale[:, rows], key)
