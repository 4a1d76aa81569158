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
from parsifl.solvers.rules import Rule

_LARGE = 1 << 20  # entries of a weight from which on a rule's passes over it are worth a call each


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
class Block:
    """The parameters of all clients of a block."""

    def __init__(self, recipe: Recipe, schedule: Schedule, tensors: Sequence[Leaf]) -> None:
        self._recipe, self._schedule = recipe, schedule
        self._count = 0  # of the clients that take the present step
        self._read: dict[str, Tensor] = {}
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
        for step in self._schedule:
            if step.count != self._count:
                self._take(step.count)
            self._recipe.network.run(self, step)
        trees = [self._params, *(self._aux if self._recipe.rule.moves_aux else [])]
        return self._schedule.restored([p[name] for p in trees for name in self._recipe.trained])

    def _take(self, count: int) -> None:
        """Let the first `count` clients take the steps that follow."""
        self._count = count
        self._read = {name: w[:count] for name, w in self._params.items()}
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
        recipe, w = self._recipe, self._read[name]
        if type(recipe.rule) is Rule and not recipe.momentum and not recipe.decay:
            add_product_(w, left, right, -recipe.lr)
        elif w.numel() < _LARGE * self._count:
            self._move(name, slice(self._count), left, right)
        else:  # several passes over a large weight: client by client it stays in the cache
            for at in range(self._count):
                one = slice(at, at + 1)
                self._move(name, one, left[one], None if right is None else right[one])

    def _move(self, name: str, rows: slice, left: Tensor, right: Tensor | None) -> None:
        recipe, w = self._recipe, self._params[name][rows]
        trees = (part[name] for part in self._aux)
        aux = tuple(leaf if len(leaf) == 1 else leaf[rows] for leaf in trees)
        if recipe.momentum:
            velocity = self._velocity[name][rows].mul_(recipe.momentum)
            trial = w.clone()
            recipe.rule.before_(trial, aux, recipe.lr)
            velocity.add_(w - trial, alpha=1 / recipe.lr)
            if recipe.decay:
                velocity.add_(w, alpha=recipe.decay)
            add_product_(velocity, left, right, 1.0)
            w.sub_(velocity, alpha=recipe.lr)
        else:
            old = w.clone() if recipe.decay and type(recipe.rule) is not Rule else w
            recipe.rule.before_(w, aux, recipe.lr)
            if recipe.decay:
                w.sub_(old, alpha=recipe.lr * recipe.decay)
            add_product_(w, left, right, -recipe.lr)
        recipe.rule.after_(w, aux, recipe.lr)
