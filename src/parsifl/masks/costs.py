"""Budgets in FLOPs, bytes and memory instead of parameters.

A frozen layer saves its weight gradient. The gradient with respect to its input is still needed
if an earlier layer is trained, so the cost of a mask is a sum over its layers plus a tail that
depends on the earliest of them. Both are measured on the module. The tail is the cost of training
all layers from the earliest on: exact for a chain of layers, and an upper bound for parallel
branches (a mask may then cost less than planned).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parsifl.core.config import is_number
from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.masks import heuristics
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import (
    Floats,
    Instance,
    instance_of,
    is_whole,
    read_budgets,
    read_objective,
    read_weights,
)
from parsifl.masks.plan import MaskPlan
from parsifl.masks.solve import solve
from parsifl.nn.layer_groups import layer_groups

if TYPE_CHECKING:
    from torch import Tensor, nn
RATES = tuple(step / 20 for step in range(20))
_DESIGNS = ("fullest", "sequential", "last", "random")


@dataclass(frozen=True, eq=False)
class Probe:
    """A module on `meta` with a sample batch, ready to be measured."""

    module: nn.Module
    sample: Tensor
    blocks: tuple[LayerGroup, ...]

    @classmethod
    def of(cls, module: nn.Module, sample: Tensor, blocks: Sequence[LayerGroup]) -> Probe:
        """Copy the module to `meta` and sort its blocks by the order in which they run."""
        import torch

        if not isinstance(sample, torch.Tensor):
            raise ConfigError(f"the sample is a {type(sample).__name__}; pass a batch as a tensor")
        ghost = copy.deepcopy(module).to("meta").train()
        batch = sample.detach().to("meta")
        turn = _running_order(ghost, batch)
        ordered = sorted(blocks, key=lambda block: min(turn[name] for name in block.parameters))
        return cls(ghost, batch, tuple(ordered))

    def forward_flops(self) -> int:
        """Return the FLOPs of a forward pass on the sample."""
        from parsifl.nn.flops import OperationCounter

        with OperationCounter() as counter:
            self.module(self.sample)
        return counter.total

    def backward_flops(self, trained: Iterable[int], *, to_input: bool = False) -> int:
        """Return the FLOPs of a backward pass that trains these blocks; the head is frozen.

        `to_input` also computes the gradient of the input, so that no inner gradient is
        skipped; for token inputs, that of their embeddings.
        """
        from parsifl.nn.flops import OperationCounter

        loss = self._loss(trained, to_input)
        if not loss.requires_grad:
            return 0
        with OperationCounter() as counter:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return counter.total

    def kept_bytes(self, trained: Iterable[int]) -> int:
        """Return the bytes of activations that autograd keeps for this backward pass."""
        import torch

        parameters = {parameter.untyped_storage()._cdata for parameter in self.module.parameters()}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._loss(trained, to_input=False)
        return sum(
            t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters
        )

    def block_bytes(self) -> Floats:
        """Return the bytes of the parameters of each block."""
        sizes = {
            name: float(parameter.numel() * parameter.element_size())
            for name, parameter in self.module.named_parameters()
        }
        return np.array([sum(sizes[name] for name in block.parameters) for block in self.blocks])

    def all_bytes(self) -> float:
        """Return the bytes of all parameters, including the head."""
        return float(sum(p.numel() * p.element_size() for p in self.module.parameters()))

    def _loss(self, trained: Iterable[int], to_input: bool) -> Tensor:
        names = {name for index in trained for name in self.blocks[index].parameters}
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in names)
        sample = self.sample.clone()
        if not to_input:
            return self._sum(sample)
        if sample.is_floating_point():
            return self._sum(sample.requires_grad_(True))
        handles = [child.register_forward_hook(_open) for child in self.module.modules()]
        try:
            return self._sum(sample)
        finally:
            for handle in handles:
                handle.remove()

    def _sum(self, sample: Tensor) -> Tensor:
        import torch

        output = self.module(sample)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"the model returns a {type(output).__name__}, but it must return the tensor that "
                "the loss is computed from"
            )
        return output.sum()


def _open(child: nn.Module, inputs: Any, output: Any) -> None:
    """Require the gradient of a module's output for integer inputs, such as an embedding."""
    import torch

    del child
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    are_integers = tensors and not any(one.is_floating_point() for one in tensors)
    if are_integers and isinstance(output, torch.Tensor) and output.is_floating_point():
        output.requires_grad_(True)


def _running_order(module: nn.Module, sample: Tensor) -> dict[str, int]:
    """Return when each parameter's module first runs.

    A module whose parent uses its weights without calling it (the output projection of torch's
    attention) runs when the parent does.
    """
    import torch

    turn: dict[str, int] = {}
    for name, child in module.named_modules():

        def note(*_: Any, name: str = name) -> None:
            turn.setdefault(name, len(turn))

        child.register_forward_pre_hook(note)  # on a copy: they may stay
    try:
        with torch.no_grad():
            module(sample)
    except Exception as error:
        shape = " x ".join(map(str, sample.shape))
        raise ConfigError(
            f"the model does not run on a sample of {shape} ({sample.dtype}): {error}"
        ) from error

    def when(owner: str) -> int:
        return turn[owner] if owner in turn or not owner else when(owner.rpartition(".")[0])

    return {name: when(name.rpartition(".")[0]) for name, _ in module.named_parameters()}


@dataclass(frozen=True, eq=False)
class Costs:
    """Blocks and the cost of training a set S of them: `sum(add[S]) + tail[first of S]`."""

    blocks: tuple[LayerGroup, ...]
    add: Floats
    tail: Floats

    def instance(
        self, budgets: Iterable[float], weights: Iterable[float] | None = None
    ) -> Instance:
        """Return the instance for these budgets; slack counts parameters that could be trained."""
        limits = read_budgets(budgets)
        parts = None if weights is None else read_weights(weights, len(limits))
        sizes = np.array([float(block.size) for block in self.blocks])
        names = tuple(block.name for block in self.blocks)
        bare = Instance(names, sizes, self.add, self.tail, limits, np.zeros_like(limits))
        catalogue = Catalogue(bare)
        able = set(limits[bare.active()].tolist())
        most = {limit: catalogue.fullest(limit)[0] for limit in able}
        reach = np.array([most.get(limit, 0.0) for limit in limits.tolist()])
        return Instance(names, sizes, self.add, self.tail, limits, reach, parts)


def flops_costs(module: nn.Module, sample: Tensor, head: str | None = None) -> Costs:
    """Measure what training each block adds to the backward FLOPs of one batch."""
    probe = Probe.of(module, sample, layer_groups(module, head))
    count = len(probe.blocks)
    # with all input gradients computed, a block adds only its weight gradient
    base = probe.backward_flops([], to_input=True)
    add = np.array([probe.backward_flops([b], to_input=True) - base for b in range(count)], float)
    backward = np.array(
        [probe.backward_flops(range(first, count)) for first in range(count)], float
    )
    return Costs(probe.blocks, add, _falling(backward - np.cumsum(add[::-1])[::-1]))


def memory_costs(
    module: nn.Module, sample: Tensor, head: str | None = None, *, slots: int = 1
) -> Costs:
    """Measure peak memory in bytes: parameters, gradients, optimiser slots, kept activations.

    The activations are those of training every block from the earliest on: an upper bound.
    `slots` is the optimiser's memory per parameter (0: plain SGD, 1: momentum, 2: Adam).
    """
    if not is_whole(slots, 0):
        raise ConfigError(f"slots must be an integer (0 for SGD, 2 for Adam), got {slots!r}")
    probe = Probe.of(module, sample, layer_groups(module, head))
    count = len(probe.blocks)
    activations = np.array(
        [probe.kept_bytes(range(first, count)) for first in range(count)], dtype=float
    )
    return Costs(
        probe.blocks,
        (1 + int(slots)) * probe.block_bytes(),
        _falling(activations) + probe.all_bytes(),
    )


def from_flops(
    module: nn.Module,
    sample: Tensor,
    flops_budgets: Iterable[float],
    *,
    objective: str = "J",
    weights: Iterable[float] | None = None,
    head: str | None = None,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of backward FLOPs on a batch like `sample`.

    The slack of a device counts parameters: the maximum it could train within its FLOPs, minus
    what it trains. `weights` are those of `optimal`.
    """
    goal, limits = read_objective(objective), read_budgets(flops_budgets)
    costs = flops_costs(module, sample, head)
    return solve(costs.instance(limits, weights), goal, seconds=seconds)


def from_bytes(
    module: nn.Module,
    bytes_budgets: Iterable[float],
    *,
    objective: str = "J",
    weights: Iterable[float] | None = None,
    head: str | None = None,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of uploaded bytes per round; `weights` as in `optimal`."""
    goal = read_objective(objective)
    blocks = layer_groups(module, head)
    sizes = {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in module.named_parameters()
    }
    add = np.array([float(sum(sizes[name] for name in block.parameters)) for block in blocks])
    costs = Costs(blocks, add, np.zeros_like(add))
    return solve(costs.instance(bytes_budgets, weights), goal, seconds=seconds)


def from_memory(
    module: nn.Module,
    sample: Tensor,
    memory_budgets: Iterable[float],
    *,
    objective: str = "J",
    weights: Iterable[float] | None = None,
    head: str | None = None,
    slots: int = 1,
    seconds: float = 15.0,
) -> MaskPlan:
    """Plan for devices with a limit of memory for a training step on `sample`.

    `weights` are those of `optimal`.
    """
    goal, limits = read_objective(objective), read_budgets(memory_budgets)
    costs = memory_costs(module, sample, head, slots=slots)
    return solve(costs.instance(limits, weights), goal, seconds=seconds)


def _falling(tail: Floats) -> Floats:
    """Raise a tail to those of later layers: reducing a mask must never cost more."""
    highest: Floats = np.maximum.accumulate(np.maximum(tail, 0.0)[::-1])[::-1]
    return highest


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
    Figure 3. Use this table to find psi for a given number of FLOPs.

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
