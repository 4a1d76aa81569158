"""SGD steps for a block of clients, landing in the weights as soon as a gradient is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from parsifl.solvers.fused.kernel import add_product_
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Leaf, Schedule
from parsifl.solvers.rules import Aux, Rule

# Entries of weights that a rule moves in one go, so that they stay in the cache from one of its
# passes to the next: a linear rule has so few that only large weights are worth a call each.
_LINEAR, _BENT = 10 << 20, 1 << 18


@dataclass(frozen=True)
class Recipe:
    """Everything about the steps that is no tensor."""

    network: Network
    rule: Rule
    lr: float
    momentum: float
    decay: float
    trained: tuple[str, ...]
    frozen: tuple[str, ...]


@final
@dataclass(frozen=True)
class _Place:
    """A weight of some clients, and what belongs to it; an auxiliary tensor may be shared."""

    w: Tensor
    aux: Aux
    velocity: Tensor | None

    def part(self, rows: slice) -> _Place:
        """Return the same for some of the clients."""
        aux = tuple(leaf if len(leaf) == 1 else leaf[rows] for leaf in self.aux)
        return _Place(self.w[rows], aux, None if self.velocity is None else self.velocity[rows])


@final
class Block:
    """The parameters of all clients of a block."""

    def __init__(self, recipe: Recipe, schedule: Schedule, tensors: Sequence[Leaf]) -> None:
        self._recipe, self._schedule = recipe, schedule
        self._line = recipe.rule.line()
        self._count = 0  # of the clients that take the present step
        self._read: dict[str, Tensor] = {}
        self._places: dict[str, _Place] = {}
        size, fixed = len(recipe.trained), len(recipe.frozen)
        own, frozen, rest = tensors[:size], tensors[size : size + fixed], tensors[size + fixed :]
        self._params = {
            name: schedule.owned(leaf) for name, leaf in zip(recipe.trained, own, strict=True)
        }
        self._frozen = {
            name: schedule.shared(leaf) for name, leaf in zip(recipe.frozen, frozen, strict=True)
        }
        taken = schedule.owned if recipe.rule.moves_aux else schedule.shared
        self._aux = [
            {
                name: taken(leaf)
                for name, leaf in zip(recipe.trained, rest[at : at + size], strict=True)
            }
            for at in range(0, len(rest), size)
        ]
        momentum = bool(recipe.momentum)
        self._velocity = {n: torch.zeros_like(v) for n, v in self._params.items() if momentum}

    def walk(self) -> tuple[Tensor, ...]:
        """Take every step; returns the parameters (and moved aux) in the order of the clients."""
        way = self._recipe.network.on(self)
        for step in self._schedule:
            if step.clients != self._count:
                self._take(step.clients)
            way.run(step)
        trees = [self._params, *(self._aux if self._recipe.rule.moves_aux else [])]
        return self._schedule.restored([p[name] for p in trees for name in self._recipe.trained])

    def _take(self, count: int) -> None:
        """Let the first `count` clients take the steps that follow."""
        self._count = count
        for name, w in self._params.items():
            aux = tuple(part[name] for part in self._aux)
            place = _Place(w, aux, self._velocity.get(name)).part(slice(count))
            self._places[name], self._read[name] = place, place.w
        for name, value in self._frozen.items():
            self._read[name] = value[:count].expand(count, *value.shape[1:])

    def read(self, name: str) -> Tensor:
        """Return a weight of the clients that take this step."""
        return self._read[name]

    def wants(self, name: str) -> bool:
        """Tell whether this is one of the parameters that are trained."""
        return name in self._params

    def land(self, name: str, left: Tensor, right: Tensor | None) -> None:
        """Apply w <- after(w - lr (g + e)) where g = left @ right (or left itself)."""
        recipe, place, count = self._recipe, self._places[name], self._count
        if type(recipe.rule) is Rule and not recipe.momentum:
            add_product_(place.w, left, right, -recipe.lr, 1 - recipe.lr * recipe.decay)
            return
        size = max(1, (_BENT if self._line is None else _LINEAR) * count // place.w.numel())
        if size >= count:
            self._move(place, left, right)
            return
        for at in range(0, count, size):
            rows = slice(at, min(at + size, count))
            self._move(place.part(rows), left[rows], None if right is None else right[rows])

    def _move(self, place: _Place, left: Tensor, right: Tensor | None) -> None:
        recipe, w, aux = self._recipe, place.w, place.aux
        if place.velocity is not None:
            add_product_(place.velocity, left, right, 1.0, recipe.momentum)
            self._add_slope(place.velocity, w, aux)
            w.sub_(place.velocity, alpha=recipe.lr)
        elif self._line is None:
            old = w.clone() if recipe.decay else w
            recipe.rule.before_(w, aux, recipe.lr)
            if recipe.decay:
                w.sub_(old, alpha=recipe.lr * recipe.decay)
            add_product_(w, left, right, -recipe.lr)
        else:
            keep = 1 - recipe.lr * (self._line.own + recipe.decay)
            add_product_(w, left, right, -recipe.lr, keep)
            for leaf, factor in zip(aux, self._line.others, strict=False):
                w.sub_(leaf, alpha=recipe.lr * factor)
        recipe.rule.after_(w, aux, recipe.lr)

    def _add_slope(self, velocity: Tensor, w: Tensor, aux: Aux) -> None:
        """Add e(w, aux) and the decay to the velocity."""
        recipe, own = self._recipe, self._recipe.decay
        if self._line is None:
            trial = w.clone()
            recipe.rule.before_(trial, aux, recipe.lr)
            velocity.add_(w - trial, alpha=1 / recipe.lr)
        else:
            own += self._line.own
            for leaf, factor in zip(aux, self._line.others, strict=False):
                velocity.add_(leaf, alpha=factor)
        if own:
            velocity.add_(w, alpha=own)
