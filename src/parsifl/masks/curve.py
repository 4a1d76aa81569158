"""The paper's Figure 3: what a device saves when it masks more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.cost_model import Probe
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import Instance, instance_of, is_number
from parsifl.nn.layer_groups import layer_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

RATES = tuple(step / 20 for step in range(20))
_DESIGNS = ("fullest", "sequential", "last", "random")


def curve(
    module: nn.Module,
    sample: Tensor,
    rates: Sequence[float] = RATES,
    *,
    head: str | None = None,
    design: str = "fullest",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return parameters and FLOPs against the masking rate 1 - psi / d_w.

    FLOPs are forward and backward of one batch like `sample`; the percentages saved are those of
    Figure 3. A device that knows its FLOPs reads its psi off this table.

    Parameters
    ----------
    design
        Which blocks a device trains within psi: the "fullest" set, as in the closed form; the
        blocks from the front ("sequential") or from the end ("last", which saves the most FLOPs)
        until the next does not fit; or blocks in a "random" order, by `seed`.
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
        row = _chosen(instance, psi, design, Key(seed, purpose=f"masks/curve {rate}"))
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


def _chosen(instance: Instance, psi: float, design: str, key: Key) -> NDArray[np.bool_]:
    if design not in _DESIGNS:
        raise ConfigError(unknown("design", design, _DESIGNS))
    if not instance.active()[0]:
        return np.zeros(len(instance.sizes), dtype=bool)
    if design == "fullest":
        return Catalogue(instance).fullest(psi)[1]
    if design in ("random", "sequential"):
        random = design == "random"
        masks = heuristics.random(instance, key) if random else heuristics.sequential(instance)
        return np.asarray(masks[0])
    fits = np.cumsum(instance.sizes[::-1]) <= psi * (1 + 1e-12)
    return np.asarray(fits[::-1])
