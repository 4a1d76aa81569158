"""Budgets in FLOPs, bytes and memory instead of parameters.

A frozen layer saves its weight gradient. The gradient with respect to its input is still needed
if an earlier layer is trained, so the cost of a mask is a sum over its layers plus a tail that
depends on the earliest of them. Both are measured on the module. The tail is what training all
layers from the earliest on takes: exact where one layer follows the other, and never too little
where branches run side by side (then a mask may cost less than its plan says).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.layer_group import LayerGroup
from parsifl.masks.cost_model import Probe
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import Floats, Instance, is_whole, read_budgets, read_objective
from parsifl.masks.plan import MaskPlan
from parsifl.masks.solve import solve
from parsifl.nn.layer_groups import layer_groups

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Costs:
    """Blocks and the cost of training a set S of them: `sum(add[S]) + tail[first of S]`."""

    blocks: tuple[LayerGroup, ...]
    add: Floats
    tail: Floats

    def instance(self, budgets: Iterable[float]) -> Instance:
        """Return the instance for these budgets; its slack counts the parameters within reach."""
        limits = read_budgets(budgets)
        sizes = np.array([float(block.size) for block in self.blocks])
        names = tuple(block.name for block in self.blocks)
        bare = Instance(names, sizes, self.add, self.tail, limits, np.zeros_like(limits))
        catalogue = Catalogue(bare)
        able = set(limits[bare.active()].tolist())
        most = {limit: catalogue.fullest(limit)[0] for limit in able}
        reach = np.array([most.get(limit, 0.0) for limit in limits.tolist()])
        return Instance(names, sizes, self.add, self.tail, limits, reach)


def flops_costs(module: nn.Module, sample: Tensor, head: str | None = None) -> Costs:
    """Measure what training each block adds to the backward FLOPs of one batch."""
    probe = Probe.of(module, sample, layer_groups(module, head))
    count = len(probe.blocks)
    # from the input on, every input gradient is there: what a block adds is its weight gradient
    base = probe.backward_flops([], to_input=True)
    add = np.array([probe.backward_flops([b], to_input=True) - base for b in range(count)], float)
    whole = np.array([probe.backward_flops(range(first, count)) for first in range(count)], float)
    return Costs(probe.blocks, add, _falling(whole - np.cumsum(add[::-1])[::-1]))


def memory_costs(
    module: nn.Module, sample: Tensor, head: str | None = None, *, slots: int = 1
) -> Costs:
    """Measure peak memory in bytes: parameters, gradients, optimiser slots, kept activations.

    The activations are those of training every block from the earliest on: never too few.
    `slots` is the optimiser's memory per parameter (0: plain SGD, 1: momentum, 2: Adam).
    """
    if not is_whole(slots, 0):
        raise ConfigError(f"slots must be an integer (0 for SGD, 2 for Adam), got {slots!r}")
    probe = Probe.of(module, sample, layer_groups(module, head))
    count = len(probe.blocks)
    kept = np.array([probe.kept_bytes(range(first, count)) for first in range(count)], dtype=float)
    return Costs(
        probe.blocks, (1 + int(slots)) * probe.block_bytes(), _falling(kept) + probe.all_bytes()
    )


def from_flops(
    module: nn.Module,
    sample: Tensor,
    flops_budgets: Iterable[float],
    *,
    objective: str = "J",
    head: str | None = None,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of backward FLOPs on a batch like `sample`.

    The slack of a device counts parameters: the most it could train within its FLOPs, less what
    it trains.
    """
    goal, limits = read_objective(objective), read_budgets(flops_budgets)
    costs = flops_costs(module, sample, head)
    return solve(costs.instance(limits), goal, seconds=seconds)


def from_bytes(
    module: nn.Module,
    bytes_budgets: Iterable[float],
    *,
    objective: str = "J",
    head: str | None = None,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of uploaded bytes per round."""
    goal = read_objective(objective)
    found = layer_groups(module, head)
    sizes = {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in module.named_parameters()
    }
    add = np.array([float(sum(sizes[name] for name in block.parameters)) for block in found])
    costs = Costs(found, add, np.zeros_like(add))
    return solve(costs.instance(bytes_budgets), goal, seconds=seconds)


def from_memory(
    module: nn.Module,
    sample: Tensor,
    memory_budgets: Iterable[float],
    *,
    objective: str = "J",
    head: str | None = None,
    slots: int = 1,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of memory for a training step on `sample`."""
    goal, limits = read_objective(objective), read_budgets(memory_budgets)
    costs = memory_costs(module, sample, head, slots=slots)
    return solve(costs.instance(limits), goal, seconds=seconds)


def _falling(tail: Floats) -> Floats:
    """Raise a tail to those of later layers: cutting a mask must never cost more."""
    highest: Floats = np.maximum.accumulate(np.maximum(tail, 0.0)[::-1])[::-1]
    return highest
