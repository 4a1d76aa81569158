"""First-order MAML steps for a block of clients (see `solvers.maml`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.core._functorch import Leaf
from parsifl.solvers.fused.layers import GradientSink, add_product_
from parsifl.solvers.fused.network import Network, Pass
from parsifl.solvers.fused.schedule import Schedule, Step
from parsifl.solvers.update_rules import SgdConfig

PARTS = 2


@dataclass(frozen=True)
class MamlSteps:
    """The settings of a block's steps (everything that is not a tensor)."""

    network: Network
    config: SgdConfig
    inner_lr: float
    trained: tuple[str, ...]


@final
class MamlBlock:
    """Parameters w of all clients, and the adapted points w - inner_lr * g(w)."""

    def __init__(self, steps: MamlSteps, schedule: Schedule, tensors: Sequence[Leaf]) -> None:
        self._steps, self._schedule = steps, schedule
        named = zip(steps.trained, tensors, strict=True)
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
        return self._schedule.restored([self._params[name] for name in self._steps.trained])

    def _ways(self, count: int) -> tuple[Pass, ...]:
        """Return the passes of the adaptation and of the update, for the first clients."""
        steps, lr, decay = self._steps, self._steps.config.lr, self._steps.config.weight_decay
        params = {name: w[:count] for name, w in self._params.items()}
        ahead = {name: point[:count] for name, point in self._ahead.items()}

        def look(name: str, left: Tensor, right: Tensor | None) -> None:
            torch.mul(params[name], 1 - steps.inner_lr * decay, out=ahead[name])
            add_product_(ahead[name], left, right, -steps.inner_lr)

        def move(name: str, left: Tensor, right: Tensor | None) -> None:
            if decay:
                params[name].sub_(ahead[name], alpha=lr * decay)
            add_product_(params[name], left, right, -lr)

        return tuple(steps.network.on(_Side(*side)) for side in ((params, look), (ahead, move)))


@final
@dataclass(frozen=True)
class _Side:
    """The weights at which a gradient is computed, and the use of that gradient."""

    weights: dict[str, Tensor]
    land: Callable[[str, Tensor, Tensor | None], None]

    def read(self, name: str) -> Tensor:
        """Return a weight."""
        return self.weights[name]

    def landing(self, name: str) -> GradientSink:
        """All parameters are trained."""
        return partial(self.land, name)


def _part(step: Step, number: int) -> Step:
    size = step.y.shape[1] // PARTS
    rows = slice(number * size, (number + 1) * size)
    key = None if step.key is None else keys.fold(step.key, number)
    return Step(step.clients, step.x[:, rows], step.y[:, rows], step.scale[:, rows], key)
