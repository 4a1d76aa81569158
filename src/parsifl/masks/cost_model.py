"""Measure a module on `meta` tensors: backward FLOPs of a mask, and the activations it keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.layer_group import LayerGroup
from parsifl.masks.instance import Floats

if TYPE_CHECKING:
    from torch import Tensor, nn


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
            raise ConfigError(f"the sample is a {type(sample).__name__}; give a batch as a tensor")
        ghost = copy.deepcopy(module).to("meta").train()
        batch = sample.detach().to("meta")
        turn = _running_order(ghost, batch)
        ordered = sorted(blocks, key=lambda block: min(turn[name] for name in block.parameters))
        return cls(ghost, batch, tuple(ordered))

    def forward_flops(self) -> int:
        """Return the FLOPs of a forward pass on the sample."""
        from parsifl.nn.models.flops import flop_counter

        with flop_counter() as counter:
            self.module(self.sample)
        return int(counter.get_total_flops())

    def backward_flops(self, trained: Iterable[int], *, to_input: bool = False) -> int:
        """Return the FLOPs of a backward pass that trains these blocks; the head is frozen.

        `to_input` asks for the gradient with respect to the input as well, so that no gradient
        inside is spared; where the input is made of numbers of tokens, for that of their vectors.
        """
        from parsifl.nn.models.flops import flop_counter

        loss = self._loss(trained, to_input)
        if not loss.requires_grad:
            return 0
        with flop_counter() as counter:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return int(counter.get_total_flops())

    def kept_bytes(self, trained: Iterable[int]) -> int:
        """Return the bytes of activations that autograd keeps for this backward pass."""
        import torch

        own = {parameter.untyped_storage()._cdata for parameter in self.module.parameters()}
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._loss(trained, to_input=False)
        return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)

    def block_bytes(self) -> Floats:
        """Return the bytes of the parameters of each block."""
        sizes = {
            name: float(parameter.numel() * parameter.element_size())
            for name, parameter in self.module.named_parameters()
        }
        return np.array([sum(sizes[name] for name in block.parameters) for block in self.blocks])

    def all_bytes(self) -> float:
        """Return the bytes of all parameters, head included."""
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
                f"the model returns a {type(output).__name__}; to be measured it must return the "
                "tensor that the loss is computed from"
            )
        return output.sum()


def _open(child: nn.Module, inputs: Any, output: Any) -> None:
    """Ask for the gradient of what a module makes of whole numbers, such as an embedding."""
    import torch

    del child
    given = [one for one in inputs if isinstance(one, torch.Tensor)]
    whole = given and not any(one.is_floating_point() for one in given)
    if whole and isinstance(output, torch.Tensor) and output.is_floating_point():
        output.requires_grad_(True)


def _running_order(module: nn.Module, sample: Tensor) -> dict[str, int]:
    """Return when each parameter's module first runs.

    A module that its parent reads instead of calling (the output projection of torch's attention)
    runs when the parent does.
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
