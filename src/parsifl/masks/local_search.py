"""Local search by groups of devices with equal masks, and device by device.

The search by device handles what the programs cannot express: unequal weights, and V.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parsifl.masks.feasible_sets import Catalogue, DeviceGroup, groups_of
from parsifl.masks.instance import Floats, Instance, Masks, Objective, floor, shares, value

_CHUNK = 3_000_000  # numbers that are processed together
_LARGEST_POOL = 60  # maximal sets tried per budget
_WORK = 500_000  # numbers processed per move: with many different devices fewer sets are tried
_MOST_SETS = 256  # tried per device: all that fit if they are few, else maximal and cut ones
_MOST_DESIGNS = 100_000  # that are compared one by one
_MOST_WORK = 2_000_000_000  # numbers processed in one pass over the devices


def improve(
    instance: Instance,
    masks: Masks,
    objective: Objective,
    catalogue: Catalogue,
    deadline: float,
) -> Masks:
    """Return masks that are at least as good; stops at a local optimum or at the deadline."""
    groups = groups_of(instance)
    design = _Design(instance, objective, groups, masks)
    pools = [_pool(catalogue, group) for group in groups]
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        design.merge()
        for row in np.argsort(-design.count, kind="stable"):
            if time.perf_counter() < deadline:
                improved |= design.move(int(row), pools[int(design.group[row])])
    candidate = design.expand(masks)
    better = value(instance, candidate, objective) < value(instance, masks, objective)
    return candidate if better and instance.broken(candidate) is None else masks


def _pool(catalogue: Catalogue, group: DeviceGroup) -> Masks:
    sets = catalogue.maximal(group.limit)
    best = np.argsort(-(sets @ catalogue.instance.sizes), kind="stable")[:_LARGEST_POOL]
    return sets[best]


class _Design:
    """Masks, stored once per (group, mask) with the number of devices that use each."""

    def __init__(
        self, instance: Instance, objective: Objective, groups: Sequence[DeviceGroup], masks: Masks
    ) -> None:
        self.instance, self.objective, self.groups = instance, objective, groups
        self.needed = instance.trainable()
        self.group: NDArray[np.intp] = np.repeat(
            np.arange(len(groups)), [len(group.members) for group in groups]
        )
        self.sets: Masks = np.concatenate([masks[group.members] for group in groups])
        self.count: Floats = np.ones(len(self.sets))

    def merge(self) -> None:
        """Merge equal rows and drop unused ones."""
        used = self.count > 0
        table = np.concatenate([self.group[used, None], self.sets[used].astype(int)], axis=1)
        rows, where = np.unique(table, axis=0, return_inverse=True)
        self.count = np.bincount(where.ravel(), weights=self.count[used]).astype(np.float64)
        self.group, self.sets = rows[:, 0], rows[:, 1:].astype(bool)

    def expand(self, masks: Masks) -> Masks:
        """Return one mask per device; devices that cannot train keep their empty mask."""
        full = masks.copy()
        for index, group in enumerate(self.groups):
            rows = self.group == index
            full[group.members] = np.repeat(self.sets[rows], self.count[rows].astype(int), axis=0)
        return full

    def move(self, row: int, pool: Masks) -> bool:
        """Try other sets for all, then for one, of a row's devices; take the best improvement."""
        if self.count[row] <= 0:
            return False
        coverage = self.count @ self.sets
        targets = self._targets(row, pool, coverage)
        current = float(self._scores(row, 0.0, self.sets[row : row + 1], coverage)[0])
        for moved in dict.fromkeys([float(self.count[row]), 1.0]):
            scores = self._scores(row, moved, targets, coverage)
            if len(scores) and scores.min() < current - 1e-9 * self.instance.total:
                self._apply(row, moved, targets[int(scores.argmin())])
                return True
        return False

    def _targets(self, row: int, pool: Masks, coverage: Floats) -> Masks:
        """List the pool's sets, restricted to the layers above each coverage (lowers gamma)."""
        floors = np.unique(coverage)
        cut = (pool[None] & (coverage >= floors[:, None])[:, None]).reshape(-1, pool.shape[1])
        same = self.sets[self.group == self.group[row]]
        targets = np.unique(np.concatenate([cut, same]), axis=0)
        limit = np.full(1, self.groups[int(self.group[row])].limit)
        targets = targets[targets.any(axis=1) & self.instance.fits(targets, limit)]
        most = max(12, _WORK // self.sets.size)
        if len(targets) <= most:
            return targets
        scores = self.instance.total / np.where(targets, coverage, np.inf).min(axis=1)
        if self.objective == "J":
            scores -= targets @ self.instance.sizes
        return targets[np.argsort(scores, kind="stable")[:most]]

    def _scores(self, row: int, moved: float, targets: Masks, coverage: Floats) -> Floats:
        """Return the objective (up to a constant) after moving `moved` devices to each target."""
        stays = self.count.copy()
        stays[row] -= moved
        is_used = stays > 0
        sets, count = self.sets[is_used], stays[is_used]
        chunk = max(1, _CHUNK // (max(1, len(sets)) * sets.shape[1]))
        parts = []
        for start in range(0, len(targets), chunk):
            some = targets[start : start + chunk]
            new = coverage + moved * (some.astype(float) - self.sets[row])
            least = np.where(sets, new[:, None, :], np.inf).min(axis=2)
            gamma = (1.0 / least) @ count
            gamma += moved / np.where(some, new, np.inf).min(axis=1)
            score = self.instance.total * gamma
            if self.objective == "J":
                score -= new @ self.instance.sizes
            parts.append(np.where((new[:, self.needed] > 0).all(axis=1), score, np.inf))
        return np.concatenate(parts) if parts else np.zeros(0)

    def _apply(self, row: int, moved: float, target: NDArray[np.bool_]) -> None:
        self.count[row] -= moved
        self.sets = np.concatenate([self.sets, target[None]])
        self.group = np.append(self.group, self.group[row])
        self.count = np.append(self.count, moved)


def exchange(
    instance: Instance,
    masks: Masks,
    objective: Objective,
    catalogue: Catalogue,
    deadline: float,
) -> Masks:
    """Let one device at a time train another set of layers; return masks at least as good.

    Stops at a local optimum or at the deadline.
    """
    groups = groups_of(instance)
    candidates = [_candidates(instance, catalogue, group, masks) for group in groups]
    work = sum(len(g.members) * len(c) for g, c in zip(groups, candidates, strict=True))
    if objective != "V" and work * masks.size > _MOST_WORK:
        return masks
    improved_masks, best = masks.copy(), value(instance, masks, objective)
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        for group, sets in zip(groups, candidates, strict=True):
            for device in group.members:
                values = _values(instance, improved_masks, int(device), sets, objective)
                choice = int(values.argmin())
                if values[choice] < best - 1e-9 * instance.total:
                    improved_masks[device], best, improved = (
                        sets[choice],
                        float(values[choice]),
                        True,
                    )
    return improved_masks


def enumerated(
    instance: Instance, objective: Objective, catalogue: Catalogue, deadline: float
) -> Masks | None:
    """Return the best of all feasible designs; None if there are too many, or time is up."""
    if not catalogue.exact:
        return None
    sets = catalogue.subsets()
    fitting = [sets[instance.fits(sets, np.full(1, limit))] for limit in instance.limits]
    # the device with the most sets comes last: its designs are compared at once
    devices = sorted(np.flatnonzero(instance.active()), key=lambda device: len(fitting[device]))
    if math.prod(len(fitting[device]) for device in devices) > _MOST_DESIGNS:
        return None
    *others, last = devices
    masks = np.zeros((instance.devices, sets.shape[1]), dtype=bool)
    best, least = masks, math.inf
    for design in itertools.product(*(fitting[device] for device in others)):
        if time.perf_counter() > deadline:
            return None
        for device, chosen in zip(others, design, strict=True):
            masks[device] = chosen
        masks[last] = fitting[last][0]
        values = _values(instance, masks, int(last), fitting[last], objective)
        choice = int(values.argmin())
        if values[choice] < least:
            best, least = masks.copy(), float(values[choice])
            best[last] = fitting[last][choice]
    return best if math.isfinite(least) else None


def _candidates(
    instance: Instance, catalogue: Catalogue, group: DeviceGroup, masks: Masks
) -> Masks:
    limit = np.full(1, group.limit)
    if catalogue.exact and 2 ** len(instance.sizes) <= _MOST_SETS:
        sets = catalogue.subsets()
        return sets[instance.fits(sets, limit)]
    maximal = catalogue.maximal(group.limit)
    fullest = np.argsort(-(maximal @ instance.sizes), kind="stable")[: _MOST_SETS // 4]
    largest = maximal[fullest]
    single = np.eye(len(instance.sizes), dtype=bool)
    cut = (largest[:, None] & ~single).reshape(-1, largest.shape[1])
    sets = np.unique(np.concatenate([largest, cut, single, masks[group.members]]), axis=0)
    return sets[sets.any(axis=1) & instance.fits(sets, limit)]


def _values(
    instance: Instance, masks: Masks, device: int, sets: Masks, objective: Objective
) -> Floats:
    """Return the objective after this device takes each of the sets."""
    weight, sizes = shares(instance, masks), instance.sizes
    device_weight = weight[device]
    change = sets.astype(float) - masks[device]
    coverage = weight @ masks + device_weight * change  # [sets, layers]
    bare = ((coverage <= 1e-12) & instance.trainable()).any(axis=1)
    safe = np.where(coverage > 1e-12, coverage, np.inf)
    if objective == "V":
        squares = (weight**2) @ masks + device_weight**2 * change
        values = (squares / safe**2) @ sizes - float((weight**2).sum()) * float(sizes.sum())
        return np.where(bare, np.inf, values)
    rest = np.delete(np.arange(len(masks)), device)
    least = np.where(masks[rest], safe[:, None, :], np.inf).min(axis=2)
    gamma = (1.0 / least) @ weight[rest] + device_weight / np.where(sets, safe, np.inf).min(axis=1)
    values = instance.total * gamma - (coverage > 1e-12) @ sizes
    if objective == "J":
        trained = masks @ sizes
        values += float((instance.reach - trained).sum()) - change @ sizes
    return np.where(bare, np.inf, values)


def lower_bound(instance: Instance, objective: Objective, least_slack: float) -> float:
    """Return a lower bound over all feasible designs.

    The bias is bounded by the floor of devices that use their whole budgets; V by the best
    fractional coverages within the budgets.
    """
    active = instance.active()
    weight = shares(instance, active[:, None])
    reach = np.where(active, np.minimum(instance.reach, instance.total), 0.0)
    able = instance.affordable()
    if objective == "V":
        return _least_variance(instance, weight, reach, able)
    covered = float(instance.sizes[instance.trainable()].sum())
    bound = floor(instance.total, covered, float(weight @ reach))
    return bound + least_slack if objective == "J" else bound


def _least_variance(instance: Instance, weight: Floats, reach: Floats, able: Masks) -> float:
    """Bound V from below.

    A layer that c_j devices train has sum_n k_nj^2 >= 1 / c_j (Cauchy and Schwarz), and the c_j
    share what all devices can train: equal numbers are best, as far as that many devices can.
    """
    sizes = instance.sizes
    most = able.sum(axis=0).astype(float)
    room = float(reach.sum())
    low, high = 0.0, float(most.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if float(sizes @ np.minimum(most, middle)) < room else (low, middle)
        )
    count: NDArray[np.float64] = np.minimum(most, high)
    inverse = np.where(count > 0, 1.0 / np.maximum(count, 1e-300), 0.0)
    return float(sizes @ inverse) - float((weight**2).sum()) * float(sizes.sum())
