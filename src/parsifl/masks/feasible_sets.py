"""Feasible sets of layers for a budget: all maximal ones, the fullest one, and a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from parsifl.core.keys import Key
from parsifl.masks.instance import Floats, Instance, Masks

ENUMERABLE = 16  # 2**16 subsets are listed in milliseconds


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Devices with the same limit and reach, hence with the same allowed sets."""

    members: NDArray[np.intp]
    limit: float
    reach: float


def groups_of(instance: Instance) -> list[DeviceGroup]:
    """Group the devices that can train something by equal budgets, weakest first."""
    active = np.flatnonzero(instance.active())
    pairs = np.stack([instance.limits[active], instance.reach[active]], axis=1)
    kinds, where = np.unique(pairs, axis=0, return_inverse=True)
    return [
        DeviceGroup(active[where.ravel() == index], float(limit), float(reach))
        for index, (limit, reach) in enumerate(kinds)
    ]


class Catalogue:
    """The sets of layers that fit into a limit, computed once per limit."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.exact = len(instance.sizes) <= ENUMERABLE
        self._maximal: dict[float, Masks] = {}
        self._subsets: Masks | None = None

    def maximal(self, limit: float) -> Masks:
        """Return the sets that fit and to which no layer can be added (a sample if not `exact`)."""
        if limit not in self._maximal:
            self._maximal[limit] = self._list(limit) if self.exact else self._sample(limit)
        return self._maximal[limit]

    def fullest(self, limit: float) -> tuple[float, NDArray[np.bool_]]:
        """Return an upper bound on the parameters that fit (tight if exact), and the best set."""
        if not self.exact:
            return _knapsack(self.instance, limit)
        sets = self.maximal(limit)
        filled = sets @ self.instance.sizes
        best = int(filled.argmax())
        return float(filled[best]), sets[best]

    def subsets(self) -> Masks:
        """Return every non-empty set of layers (if `exact`)."""
        if self._subsets is None:
            count = len(self.instance.sizes)
            bits = np.arange(1, 2**count)[:, None] >> np.arange(count)
            self._subsets = (bits & 1).astype(bool)
        return self._subsets

    def _list(self, limit: float) -> Masks:
        sets = self.subsets()
        fitting = self.instance.fits(sets, np.full(1, limit))
        index = np.zeros(len(sets) + 1, dtype=bool)
        index[1:] = fitting  # position in the list = the subset's bits
        code = np.arange(1, len(sets) + 1)
        grows = np.zeros(len(sets), dtype=bool)
        for layer in range(sets.shape[1]):
            grows |= ~sets[:, layer] & index[code | (1 << layer)]
        return sets[fitting & ~grows]

    def _sample(self, limit: float, count: int = 120) -> Masks:
        """Fill greedily in fixed, reversed, by-size and random orders."""
        layers = len(self.instance.sizes)
        random = Key(0, purpose="mask patterns").numpy_generator()
        by_size = np.argsort(-self.instance.sizes, kind="stable")
        orders = [np.arange(layers), np.arange(layers)[::-1], by_size, by_size[::-1]]
        orders += [random.permutation(layers) for _ in range(count)]
        sets = [fill(self.instance, order, limit) for order in orders]
        sets.append(_knapsack(self.instance, limit)[1])
        return np.unique(np.array(sets), axis=0)


def fill(instance: Instance, order: NDArray[np.intp], limit: float) -> NDArray[np.bool_]:
    """Take layers in this order, skipping those that no longer fit."""
    roof = limit + 1e-9 * max(1.0, abs(limit))
    chosen = np.zeros(len(instance.sizes), dtype=bool)
    spent, first = 0.0, len(chosen)
    for layer in order:
        start = min(first, int(layer))
        if spent + instance.add[layer] + instance.tail[start] <= roof:
            chosen[layer] = True
            spent, first = spent + float(instance.add[layer]), start
    return chosen


def _knapsack(instance: Instance, limit: float) -> tuple[float, NDArray[np.bool_]]:
    """Solve the fullest set with HiGHS, once per earliest layer (the tail is not additive)."""
    count = len(instance.sizes)
    additive = not instance.tail.any()
    best, bound = np.zeros(count, dtype=bool), 0.0
    for first in [0] if additive else range(count):
        room = limit - instance.tail[first] + 1e-9 * max(1.0, abs(limit))
        lower: Floats = np.zeros(count)
        lower[first] = 0.0 if additive else 1.0
        upper = np.where(np.arange(count) >= first, 1.0, 0.0)
        if float(lower @ instance.add) > room:
            continue
        optimum = milp(
            -instance.sizes,
            integrality=np.ones(count, dtype=np.int64),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(instance.add[None], -np.inf, room),
            options={"time_limit": 1.0},
        )
        dual = optimum.mip_dual_bound
        bound = max(bound, float(instance.sizes.sum()) if dual is None else -dual)
        chosen = np.asarray(optimum.x) > 0.5
        if chosen @ instance.sizes > best @ instance.sizes:
            best = chosen
    return bound, best
