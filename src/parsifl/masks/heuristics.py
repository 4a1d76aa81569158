"""Simple designs: baselines of the exact solver, and starting points of its search."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from parsifl.core.keys import Key
from parsifl.masks.feasible_sets import Catalogue, fill, groups_of
from parsifl.masks.instance import Floats, Instance, Masks, Objective, value

_SECONDS = 10.0


def sequential(instance: Instance) -> Masks:
    """Assign layers 0, 1, 2, ... to each device until the next does not fit."""
    masks = np.zeros((instance.devices, len(instance.sizes)), dtype=bool)
    prefixes = np.tri(len(instance.sizes), dtype=bool)
    for group in groups_of(instance):
        fitting = instance.fits(prefixes, np.full(1, group.limit))
        length = len(fitting) if fitting.all() else int(fitting.argmin())
        masks[group.members, :length] = True
    return masks


def random(instance: Instance, key: Key) -> Masks:
    """Assign layers to each device in a random order, skipping those that do not fit."""
    generator = key.numpy_generator()
    layers = len(instance.sizes)
    return np.array(
        [fill(instance, generator.permutation(layers), limit) for limit in instance.limits]
    )


def random_family(instance: Instance, key: Key, count: int) -> Masks:
    """Draw `count` random designs at once: [count, N, L]."""
    generator = key.numpy_generator()
    devices, layers = instance.devices, len(instance.sizes)
    order = generator.random((count, devices, layers)).argsort(axis=-1)
    masks = np.zeros((count, devices, layers), dtype=bool)
    spent = np.zeros((count, devices))
    first = np.full((count, devices), layers - 1)
    roof = instance.limits + 1e-9 * np.maximum(1.0, instance.limits)
    for step in range(layers):
        layer = order[..., step]
        start = np.minimum(first, layer)
        fits = spent + instance.add[layer] + instance.tail[start] <= roof
        np.put_along_axis(masks, layer[..., None], fits[..., None], axis=-1)
        spent = np.where(fits, spent + instance.add[layer], spent)
        first = np.where(fits, start, first)
    return masks


def best_of_random(
    instance: Instance, key: Key, count: int = 1000, objective: Objective = "J"
) -> Masks | None:
    """Return the best feasible of `count` random designs, or None if none is feasible."""
    best, best_value = None, np.inf
    # chunks keep the memory near a few megabytes
    chunk = max(1, 500_000 // (instance.devices * len(instance.sizes)))
    for start in range(0, count, chunk):
        family = random_family(instance, key.replace(round=start), min(chunk, count - start))
        values = family_values(instance, family, objective)
        for index in np.argsort(values, kind="stable"):
            if values[index] >= best_value:
                break
            if instance.broken(family[index]) is None:
                best, best_value = family[index], float(values[index])
                break
    return best


def family_values(instance: Instance, family: Masks, objective: Objective) -> Floats:
    """Return the objective of each design in [count, N, L] (as `instance.value`, all at once)."""
    if objective == "V" or instance.weights is not None:
        return np.array([value(instance, masks, objective) for masks in family])
    coverage = family.sum(axis=1)
    least = np.where(family, coverage[:, None, :], np.inf).min(axis=2)
    values = instance.total * (1.0 / least).sum(axis=1) - (coverage > 0) @ instance.sizes
    if objective == "J":
        values += instance.reach.sum() - coverage @ instance.sizes
    return np.asarray(values)


def common(instance: Instance, catalogue: Catalogue) -> Masks:
    """One mask for devices that cannot train the costliest layer; the others train all they can.

    With one budget for the weak devices this is the optimum of the closed form.
    """
    affordable = instance.affordable()
    costliest = int(np.where(instance.trainable(), affordable.sum(axis=0), np.inf).argmin())
    weak = instance.active() & ~affordable[:, costliest]
    masks = np.zeros(affordable.shape, dtype=bool)
    if weak.any():
        masks[weak] = catalogue.fullest(float(instance.limits[weak].min()))[1]
    for group in groups_of(instance):
        if affordable[group.members[0], costliest]:
            masks[group.members] = catalogue.fullest(group.limit)[1]
    return masks


def spread(instance: Instance) -> Masks:
    """Assign the least covered layers to devices in order of strength."""
    masks = np.zeros((instance.devices, len(instance.sizes)), dtype=bool)
    coverage = np.zeros(len(instance.sizes))
    for device in np.argsort(instance.limits, kind="stable"):
        order = np.lexsort((-instance.sizes, coverage))
        masks[device] = fill(instance, order, float(instance.limits[device]))
        coverage += masks[device]
    return masks


def repaired(instance: Instance, masks: Masks) -> Masks:
    """Give idle devices a layer and uncovered layers a device, within the budgets."""
    fixed = masks.copy()
    affordable = instance.affordable()
    for layer in np.flatnonzero(instance.trainable() & ~fixed.any(axis=0)):
        _cover(instance, fixed, int(layer), affordable[:, layer])
    coverage = fixed.sum(axis=0)
    for device in np.flatnonzero(instance.active() & ~fixed.any(axis=1)):
        fixed[device, int(np.where(affordable[device], coverage, -1).argmax())] = True
    return fixed


def topped_up(instance: Instance, masks: Masks) -> Masks:
    """Let devices train more layers if that raises coverages without raising any gamma."""
    full = masks.copy()
    coverage = full.sum(axis=0)
    by_size = np.argsort(-instance.sizes, kind="stable")
    roof = instance.limits + 1e-9 * np.maximum(1.0, instance.limits)
    for device in np.flatnonzero(full.any(axis=1)):
        row = full[device]
        least, first = coverage[row].min(), int(row.argmax())
        spent = float(row @ instance.add)
        for layer in by_size[~row[by_size]]:
            start = min(first, int(layer))
            cost = spent + float(instance.add[layer]) + float(instance.tail[start])
            if coverage[layer] + 1 >= least and cost <= roof[device]:
                row[layer] = True
                coverage[layer] += 1
                spent, first = spent + float(instance.add[layer]), start
    return full


def _cover(instance: Instance, masks: Masks, layer: int, able: np.ndarray) -> None:
    """Let the strongest device train `layer`, dropping well-covered layers to make room."""
    for device in np.argsort(-np.where(able, instance.limits, -1.0), kind="stable"):
        if not able[device]:
            return
        coverage = masks.sum(axis=0)
        keep = masks[device] & (coverage == 1)
        keep[layer] = True
        if not instance.fits(keep[None], instance.limits[device : device + 1])[0]:
            continue
        order = np.concatenate([np.flatnonzero(keep), np.flatnonzero(masks[device] & ~keep)])
        masks[device] = fill(instance, order, float(instance.limits[device]))
        return


def widest(instance: Instance) -> tuple[Masks, NDArray[np.intp]]:
    """Return masks that cover the most parameters, and the affordable layers they omit."""
    catalogue = Catalogue(instance)
    masks = np.zeros((instance.devices, len(instance.sizes)), dtype=bool)
    for group in groups_of(instance):
        masks[group.members] = catalogue.fullest(group.limit)[1]
    # limits order the devices: what a weak one affords, a strong one affords too
    active = np.flatnonzero(instance.active())
    order = active[np.argsort(-instance.limits[active], kind="stable")]
    strongest = order[: len(instance.sizes)]
    masks[strongest] = _cover_most(instance, strongest)
    left = np.flatnonzero(instance.trainable() & ~masks.any(axis=0))
    masks[:, left] = False
    return masks, left


def _cover_most(instance: Instance, devices: NDArray[np.intp]) -> Masks:
    """Solve for masks m, earliest layers e and covered layers v: maximise sizes @ v."""
    layers, count = len(instance.sizes), len(devices)
    limits = instance.limits[devices] * (1 + 1e-9)
    each, ones = sparse.eye_array(count), np.ones((1, layers))
    # rows: cost <= limit; one earliest layer; nothing before it; covered only if trained
    spend = sparse.kron(each, instance.add[None]), sparse.kron(each, instance.tail[None])
    reached = sparse.kron(each, sparse.csr_array(np.tri(layers)))
    columns = count * layers
    empty = sparse.csr_array((count, layers))
    blocks: list[list[Any]] = [
        [spend[0], spend[1], empty],
        [sparse.csr_array((count, columns)), sparse.kron(each, ones), empty],
        [sparse.eye_array(columns), -reached, sparse.csr_array((columns, layers))],
        [
            -sparse.kron(np.ones((1, count)), sparse.eye_array(layers)),
            sparse.csr_array((layers, columns)),
            sparse.eye_array(layers),
        ],
    ]
    rows = sparse.csr_array(sparse.block_array(blocks))
    upper = np.concatenate([limits, np.ones(count), np.zeros(columns + layers)])
    # a small reward for training more keeps devices from idling
    gain = np.tile(instance.sizes, count) * 1e-3 / count
    cost = -np.concatenate([gain, np.zeros(columns), instance.sizes]) / instance.total
    optimum = milp(
        cost,
        integrality=np.ones(len(cost), dtype=np.int64),
        bounds=Bounds(0.0, 1.0),
        constraints=LinearConstraint(rows, -np.inf, upper),
        options={"time_limit": _SECONDS},
    )
    if optimum.x is None:
        return np.zeros((count, layers), dtype=bool)
    return np.asarray(optimum.x[:columns].reshape(count, layers) > 0.5)
