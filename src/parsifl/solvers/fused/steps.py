"""SGD steps for a block of clients, applied to the weights as soon as a gradient is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from parsifl.core._functorch import Leaf
from parsifl.solvers.fused.layers import GradientSink, add_product_
from parsifl.solvers.fused.network import Network
from parsifl.solvers.fused.schedule import Schedule, Step
from parsifl.solvers.update_rules import Aux, Rule, SgdConfig

# Entries of weights that a rule updates at once, so that they stay in the cache between its
# passes. A linear rule has so few passes that only large weights are worth separate calls.
_LINEAR, _BENT = 10 << 20, 1 << 18
_BROAD = 64  # outputs above which transposing the first weight is worthwhile


@dataclass(frozen=True)
class Steps:
    """The settings of a block's steps (everything that is not a tensor)."""

    network: Network
    config: SgdConfig
    rule: Rule
    trained: tuple[str, ...]
    frozen: tuple[str, ...]


@final
@dataclass(frozen=True)
class _Place:
    """A weight of some clients with its rule and its auxiliary tensors, which may be shared."""

    rule: Rule
    w: Tensor
    aux: Aux
    velocity: Tensor | None

    def part(self, rows: slice) -> _Place:
        """Return the same for some of the clients."""
        aux = tuple(leaf if len(leaf) == 1 else leaf[rows] for leaf in self.aux)
        velocity = None if self.velocity is None else self.velocity[rows]
        return _Place(self.rule, self.w[rows], aux, velocity)


@final
class Block:
    """The parameters of all clients of a block."""

    def __init__(self, steps: Steps, schedule: Schedule, tensors: Sequence[Leaf]) -> None:
        self._steps, self._schedule = steps, schedule
        size, fixed = len(steps.trained), len(steps.frozen)
        trained, frozen, rest = (
            tensors[:size],
            tensors[size : size + fixed],
            tensors[size + fixed :],
        )
        trees = [
            dict(zip(steps.trained, part, strict=True))
            for part in (trained, *(rest[at : at + size] for at in range(0, len(rest), size)))
        ]
        across = _lies_across(steps, trees)
        params, *aux = trees
        self._params = {n: _taken(schedule.owned, leaf, n == across) for n, leaf in params.items()}
        self._frozen = {
            name: schedule.shared(leaf) for name, leaf in zip(steps.frozen, frozen, strict=True)
        }
        taken = schedule.owned if steps.rule.moves_aux else schedule.shared
        self._aux = [
            {n: _taken(taken, leaf, n == across) for n, leaf in part.items()} for part in aux
        ]
        momentum = bool(steps.config.momentum)
        self._velocity = {n: torch.zeros_like(v) for n, v in self._params.items() if momentum}

    def walk(self) -> tuple[Tensor, ...]:
        """Take all steps; return the parameters (and updated aux) in the order of the clients."""
        count, way = 0, None
        for step in self._schedule:
            if way is None or step.clients != count:
                count = step.clients
                way = self._steps.network.on(self._leading(count))
            way.run(step)
        trees = [self._params, *(self._aux if self._steps.rule.moves_aux else [])]
        return self._schedule.restored([p[name] for p in trees for name in self._steps.trained])

    def _leading(self, count: int) -> _Leading:
        """Return the first `count` clients, which take the following steps."""
        states = {}
        for name, w in self._params.items():
            aux = tuple(part[name] for part in self._aux)
            state = _Place(self._steps.rule.of(name), w, aux, self._velocity.get(name))
            states[name] = state.part(slice(count))
        frozen = {
            name: value[:count].expand(count, *value.shape[1:])
            for name, value in self._frozen.items()
        }
        return _Leading(self._steps, states, frozen)


def _lies_across(steps: Steps, trees: Sequence[Mapping[str, Leaf]]) -> str | None:
    """Return the weight that is stored as [in, out], which makes its products faster.

    Only a layer that passes no gradient down benefits, and only weights that all clients share at
    the start can be transposed cheaply (docs/adr/0003).
    """
    name = steps.network.opening(steps.trained)
    if name is None or any(tree[name][1] is not None for tree in trees):
        return None
    return name if len(trees[0][name][0]) >= _BROAD else None


def _taken(take: Callable[[Leaf], Tensor], leaf: Leaf, across: bool) -> Tensor:
    tensor, dim = leaf
    return take((tensor.mT.contiguous(), dim)).mT if across else take(leaf)


@final
class _Leading:
    """The clients that still have steps to take, as host of their network."""

    def __init__(
        self, steps: Steps, states: Mapping[str, _Place], frozen: Mapping[str, Tensor]
    ) -> None:
        self._steps, self._places, self._frozen = steps, states, frozen
        self._line = steps.rule.line()

    def read(self, name: str) -> Tensor:
        """Return a weight of these clients."""
        return self._places[name].w if name in self._places else self._frozen[name]

    def landing(self, name: str) -> GradientSink | None:
        """Return the step w <- after(w - lr (g + e)) of a trained weight."""
        if name not in self._places:
            return None
        rule, config, state = self._steps.rule, self._steps.config, self._places[name]
        if type(rule) is Rule and not config.momentum:
            keep = 1 - config.lr * config.weight_decay
            return partial(add_product_, state.w, factor=-config.lr, keep=keep)
        count, entries = len(state.w), _BENT if self._line is None else _LINEAR
        size = max(1, entries * count // state.w.numel())
        cuts = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        if len(cuts) == 1:
            return partial(self._move, state)
        return partial(self._move_parts, [(rows, state.part(rows)) for rows in cuts])

    def _move_parts(
        self, parts: Sequence[tuple[slice, _Place]], left: Tensor, right: Tensor | None
    ) -> None:
        for rows, state in parts:
            self._move(state, left[rows], None if right is None else right[rows])

    def _move(self, state: _Place, left: Tensor, right: Tensor | None) -> None:
        rule, config, w, aux = state.rule, self._steps.config, state.w, state.aux
        if state.velocity is not None:
            add_product_(state.velocity, left, right, 1.0, config.momentum)
            self._add_slope(state.velocity, state)
            if rule.takes_step:
                w.zero_()
            w.sub_(state.velocity, alpha=config.lr)
        elif self._line is None:
            old = w.clone() if config.weight_decay else w
            if rule.takes_step:
                w.zero_()
            rule.before_(w, aux, config.lr)
            if config.weight_decay:
                w.sub_(old, alpha=config.lr * config.weight_decay)
            add_product_(w, left, right, -config.lr)
        else:
            decay = self._line.own + config.weight_decay
            keep = -config.lr * decay if rule.takes_step else 1 - config.lr * decay
            add_product_(w, left, right, -config.lr, keep)
            for leaf, factor in zip(aux, self._line.others, strict=False):
                w.sub_(leaf, alpha=config.lr * factor)
        rule.after_(w, aux, config.lr)

    def _add_slope(self, velocity: Tensor, state: _Place) -> None:
        """Add e(w, aux) and the decay to the velocity."""
        rule, config, w, aux = state.rule, self._steps.config, state.w, state.aux
        decay = config.weight_decay
        if self._line is None:
            trial = w.clone()
            rule.before_(trial, aux, config.lr)
            velocity.add_(w - trial, alpha=1 / config.lr)
        else:
            decay += self._line.own
            for leaf, factor in zip(aux, self._line.others, strict=False):
                velocity.add_(leaf, alpha=factor)
        if decay:
            velocity.add_(w, alpha=decay)


@final
class GradientCollector:
    """Collects gradients without changing the weights."""

    def __init__(self, values: Mapping[str, Tensor], wanted: frozenset[str]) -> None:
        self._values, self._wanted = values, wanted
        self._gradients: dict[str, Tensor] = {}

    def at(self, network: Network, step: Step) -> dict[str, Tensor]:
        """Return the gradient of every requested weight."""
        network.on(self).run(step)
        return self._gradients

    def read(self, name: str) -> Tensor:
        """Return a weight of all clients."""
        return self._values[name]

    def landing(self, name: str) -> GradientSink | None:
        """Store the gradient of a trained weight."""
        return partial(self._keep, name) if name in self._wanted else None

    def _keep(self, name: str, left: Tensor, right: Tensor | None) -> None:
        shape = self._values[name].shape
        self._gradients[name] = left if right is None else torch.bmm(left, right).view(shape)
