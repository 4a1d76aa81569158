"""The paper's Figure 3: what a device saves when it masks more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parsifl.core.errors import ConfigError
from parsifl.masks.cost_model import Probe
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import Instance, instance_of, is_number
from parsifl.nn.layer_groups import layer_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

RATES = tuple(step / 20 for step in range(20))


def curve(
    module: nn.Module,
    sample: Tensor,
    rates: Sequence[float] = RATES,
    *,
    head: str | None = None,
    design: str = "fullest",
) -> list[dict[str, Any]]:
    """Return parameters and FLOPs against the masking rate 1 - psi / d_w.

    For each rate the device trains the fullest set of blocks within psi, as in the closed form,
    or (`design="last"`) a run of the last blocks that fit, which saves the most FLOPs. FLOPs are
    forward and backward of one batch like `sample`; the percentages saved are those of Figure 3.
    A device that knows its FLOPs reads its psi off this table.
    """
    probe = Probe.of(module, sample, layer_groups(module, head))
    total = sum(block.size for block in probe.blocks)
    forward = probe.forward_flops()
    everything = forward + probe.backward_flops(range(len(probe.blocks)))
    table = []
    for rate in rates:
        if not is_number(rate) or not 0.0 <= rate < 1.0:
            raise ConfigError(f"the masking rate must be at least 0 and below 1, got {rate!r}")
        psi = (1.0 - rate) * total
        instance = instance_of(probe.blocks, [psi])
        row = _chosen(instance, psi, design)
        parameters = int(row @ instance.sizes)
        backward = probe.backward_flops(np.flatnonzero(row).tolist())
        table.append(
            {
                "rate": rate,
                "psi": psi,
                "parameters": parameters,
                "parameters_saved": 100.0 * (1.0 - parameters / total),
                "forward_flops": forward,
                "backward_flops": backward,
                "flops_saved": 100.0 * (1.0 - (forward + backward) / everything),
                "layers": [probe.blocks[index].name for index in np.flatnonzero(row)],
            }
        )
    return table


def _chosen(instance: Instance, psi: float, design: str) -> NDArray[np.bool_]:
    layers = len(instance.sizes)
    if design not in ("fullest", "last"):
        raise ConfigError(f"unknown design {design!r}; use 'fullest' or 'last'")
    if not instance.active()[0]:
        return np.zeros(layers, dtype=bool)
    if design == "fullest":
        return Catalogue(instance).fullest(psi)[1]
    row, spent = np.zeros(layers, dtype=bool), 0.0
    for layer in range(layers - 1, -1, -1):
        if spent + instance.sizes[layer] <= psi * (1 + 1e-12):
            row[layer] = True
            spent += float(instance.sizes[layer])
        elif row.any():
            break  # one more layer towards the input would cost FLOPs and hardly train anything
    return row
