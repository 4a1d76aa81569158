"""Measure a module on `meta` tensors: backward FLOPs of a mask, and the activations it keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parsifl.blocks import Block
from parsifl.masks.instance import Floats

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Probe:
    """A module on `meta` with a sample batch, ready to be measured."""

    module: nn.Module
    sample: Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, module: nn.Module, sample: Tensor, blocks: Sequence[Block]) -> Probe:
        """Copy the module to `meta` and sort its blocks by the order in which they run."""
        ghost = copy.deepcopy(module).to("meta").train()
        batch = sample.to("meta")
        turn = _running_order(ghost, batch)
        last = len(turn)
        ordered = sorted(blocks, key=lambda block: min(turn.get(n, last) for n in block.parameters))
        return cls(ghost, batch, tuple(ordered))

    def forward_flops(self) -> int:
        """Return the FLOPs of a forward pass on the sample."""
        from parsifl.models.flops import flop_counter

        with flop_counter() as counter:
            self.module(self.sample)
        return int(counter.get_total_flops())

    def backward_flops(self, trained: Iterable[int], *, to_input: bool = False) -> int:
        """Return the FLOPs of a backward pass that trains these blocks; the head is frozen."""
        from parsifl.models.flops import flop_counter

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
        sample = self.sample.detach().clone()
        if to_input:
            sample.requires_grad_(True)
        loss: Tensor = self.module(sample).sum()
        return loss


def _running_order(module: nn.Module, sample: Tensor) -> dict[str, int]:
    """Return when each parameter's module first runs."""
    import torch

    turn: dict[str, int] = {}
    handles = []
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        own = [prefix + leaf for leaf, _ in child.named_parameters(recurse=False)]

        def note(*_: Any, own: list[str] = own) -> None:
            for leaf in own:
                turn.setdefault(leaf, len(turn))

        handles.append(child.register_forward_pre_hook(note))
    with torch.no_grad():
        module(sample)
    for handle in handles:
        handle.remove()
    return turn
