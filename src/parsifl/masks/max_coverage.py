"""A design that trains as much of the model as the devices can train between them.

That every layer can be afforded by some device does not mean that all can be trained at once:
one device with room for either of two layers cannot train both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from parsifl.masks.feasible_sets import Catalogue, groups_of
from parsifl.masks.instance import Instance, Masks

_SECONDS = 10.0


def widest(instance: Instance) -> tuple[Masks, NDArray[np.intp]]:
    """Return masks that cover the most parameters, and the affordable layers they leave out."""
    catalogue = Catalogue(instance)
    masks = np.zeros((instance.devices, len(instance.sizes)), dtype=bool)
    for group in groups_of(instance):
        masks[group.members] = catalogue.fullest(group.limit)[1]
    # a limit orders the devices: whatever a weak one affords, a strong one affords too
    active = np.flatnonzero(instance.active())
    order = active[np.argsort(-instance.limits[active], kind="stable")]
    strongest = order[: len(instance.sizes)]
    masks[strongest] = _cover(instance, strongest)
    left = np.flatnonzero(instance.trainable() & ~masks.any(axis=0))
    masks[:, left] = False
    return masks, left


def _cover(instance: Instance, devices: NDArray[np.intp]) -> Masks:
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
    # a little reward for training more keeps devices from idling
    gain = np.tile(instance.sizes, count) * 1e-3 / count
    cost = -np.concatenate([gain, np.zeros(columns), instance.sizes]) / instance.total
    found = milp(
        cost,
        integrality=np.ones(len(cost), dtype=np.int64),
        bounds=Bounds(0.0, 1.0),
        constraints=LinearConstraint(rows, -np.inf, upper),
        options={"time_limit": _SECONDS},
    )
    if found.x is None:
        return np.zeros((count, layers), dtype=bool)
    return np.asarray(found.x[:columns].reshape(count, layers) > 0.5)
