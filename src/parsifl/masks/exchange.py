"""Search device by device, for what the programs cannot express: unequal weights, and V.

Every device in turn takes the set of layers that lowers the objective most, until none does.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from parsifl.masks.feasible_sets import Catalogue, DeviceGroup, groups_of
from parsifl.masks.instance import Floats, Instance, Masks, Objective, floor, shares, value

_MOST_SETS = 256  # tried per device: all that fit if they are few, else maximal and cut ones
_MOST_WORK = 2_000_000_000  # numbers looked at in one pass over the devices


def exchange(
    instance: Instance,
    masks: Masks,
    objective: Objective,
    catalogue: Catalogue,
    deadline: float,
) -> Masks:
    """Return masks that are at least as good; stops at a local optimum or at the deadline."""
    groups = groups_of(instance)
    candidates = [_candidates(instance, catalogue, group, masks) for group in groups]
    work = sum(len(g.members) * len(c) for g, c in zip(groups, candidates, strict=True))
    if objective != "V" and work * masks.size > _MOST_WORK:
        return masks
    found, best = masks.copy(), value(instance, masks, objective)
    improved = True
    while improved and time.perf_counter() < deadline:
        improved = False
        for group, sets in zip(groups, candidates, strict=True):
            for device in group.members:
                values = _values(instance, found, int(device), sets, objective)
                choice = int(values.argmin())
                if values[choice] < best - 1e-9 * instance.total:
                    found[device], best, improved = sets[choice], float(values[choice]), True
    return found


def _candidates(
    instance: Instance, catalogue: Catalogue, group: DeviceGroup, masks: Masks
) -> Masks:
    limit = np.full(1, group.limit)
    if catalogue.exact and 2 ** len(instance.sizes) <= _MOST_SETS:
        sets = catalogue.subsets()
        return sets[instance.fits(sets, limit)]
    maximal = catalogue.maximal(group.limit)
    fullest = np.argsort(-(maximal @ instance.sizes), kind="stable")[: _MOST_SETS // 4]
    whole = maximal[fullest]
    single = np.eye(len(instance.sizes), dtype=bool)
    cut = (whole[:, None] & ~single).reshape(-1, whole.shape[1])
    sets = np.unique(np.concatenate([whole, cut, single, masks[group.members]]), axis=0)
    return sets[sets.any(axis=1) & instance.fits(sets, limit)]


def _values(
    instance: Instance, masks: Masks, device: int, sets: Masks, objective: Objective
) -> Floats:
    """Return the objective after this device takes each of the sets."""
    weight, sizes = shares(instance, masks), instance.sizes
    own = weight[device]
    change = sets.astype(float) - masks[device]
    coverage = weight @ masks + own * change  # [sets, layers]
    bare = ((coverage <= 1e-12) & instance.trainable()).any(axis=1)
    safe = np.where(coverage > 1e-12, coverage, np.inf)
    if objective == "V":
        squares = (weight**2) @ masks + own**2 * change
        found = (squares / safe**2) @ sizes - float((weight**2).sum()) * float(sizes.sum())
        return np.where(bare, np.inf, found)
    rest = np.delete(np.arange(len(masks)), device)
    least = np.where(masks[rest], safe[:, None, :], np.inf).min(axis=2)
    gamma = (1.0 / least) @ weight[rest] + own / np.where(sets, safe, np.inf).min(axis=1)
    found = instance.total * gamma - (coverage > 1e-12) @ sizes
    if objective == "J":
        trained = masks @ sizes
        found += float((instance.reach - trained).sum()) - change @ sizes
    return np.where(bare, np.inf, found)


def lower_bound(instance: Instance, objective: Objective, least_slack: float) -> float:
    """Return what no feasible design can go below.

    The bias is bounded by the floor of devices that use their whole budgets; V by coverages that
    share the budgets best if they need not be whole.
    """
    active = instance.active()
    weight = shares(instance, active[:, None])
    reach = np.where(active, np.minimum(instance.reach, instance.total), 0.0)
    able = instance.affordable()
    if objective == "V":
        return _least_variance(instance, weight, reach, able)
    covered = float(instance.sizes[instance.trainable()].sum())
    found = floor(instance.total, covered, float(weight @ reach))
    return found + least_slack if objective == "J" else found


def _least_variance(instance: Instance, weight: Floats, reach: Floats, able: Masks) -> float:
    """Bound V from below.

    A layer that c_j devices train has sum_n k_nj^2 >= 1 / c_j (Cauchy and Schwarz), and the c_j
    share what all devices can train: best is the same number for all layers, where that many can.
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
