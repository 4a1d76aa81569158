"""A chain of layers for a block of clients: forward, and backward without autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from parsifl.problems import layers
from parsifl.problems.layers import Chain, parameters
from parsifl.problems.scoring import Loss
from parsifl.solvers.fused.convolution import ConvKernel
from parsifl.solvers.fused.kernel import Host, Kernel, Trace
from parsifl.solvers.fused.pictures import (
    AdaptivePoolKernel,
    GroupNormKernel,
    LayerNormKernel,
    PoolKernel,
)
from parsifl.solvers.fused.schedule import Step
from parsifl.solvers.fused.simple import (
    ActivateKernel,
    DropoutKernel,
    EmbedKernel,
    FlattenKernel,
    LinearKernel,
)

_KERNELS: dict[type[Any], Kernel] = {
    layers.Linear: LinearKernel(),
    layers.Conv: ConvKernel(),
    layers.Embed: EmbedKernel(),
    layers.GroupNorm: GroupNormKernel(),
    layers.LayerNorm: LayerNormKernel(),
    layers.Pool: PoolKernel(),
    layers.AdaptivePool: AdaptivePoolKernel(),
    layers.Dropout: DropoutKernel(),
    layers.Activate: ActivateKernel(),
    layers.Flatten: FlattenKernel(),
}


@final
@dataclass(frozen=True)
class Network:
    """A chain of layers with its loss."""

    chain: Chain
    loss: Loss

    @property
    def keyed(self) -> bool:
        """Whether a layer draws random numbers."""
        return any(isinstance(layer, layers.Dropout) for layer in self.chain)

    def run(self, host: Host, step: Step) -> None:
        """Land the gradients of all weights that the host wants; they may move at once."""
        traces = self._forward(host, step)
        output = traces[-1].output if traces else step.x
        gradient = _LOSSES[self.loss](output, step.y, step.scale)
        first = self._first_wanted(host)
        for at in range(len(self.chain) - 1, first - 1, -1):
            layer = self.chain[at]
            kernel = _KERNELS[type(layer)]
            gradient = kernel.backward(layer, host, traces[at], gradient, at > first)

    def _forward(self, host: Host, step: Step) -> list[Trace]:
        traces: list[Trace] = []
        value = step.x
        for layer in self.chain:
            traces.append(_KERNELS[type(layer)].forward(layer, host, value, step.key))
            value = traces[-1].output
        return traces

    def _first_wanted(self, host: Host) -> int:
        for at, layer in enumerate(self.chain):
            if any(host.wants(name) for name in parameters(layer)):
                return at
        return len(self.chain)


def _cross_entropy(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of sum(scale * l) in the output; `scale` is [clients, rows]."""
    gradient = torch.softmax(output, -1)
    gradient.scatter_add_(2, y[..., None], gradient.new_full((*y.shape, 1), -1.0))
    return gradient.mul_(scale[..., None])


def _squared_error(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the same for the mean of the squares of a row."""
    gap = output.reshape(y.shape) - y
    share = scale * (2 / y[0, 0].numel())
    return gap.mul_(share.reshape(*share.shape, *(1,) * (y.ndim - 2))).reshape(output.shape)


_LOSSES = {"cross-entropy": _cross_entropy, "mse": _squared_error}
