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
from parsifl.solvers.fused.kernel import Host, Kernel
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


_WIDE = 16  # classes from which on torch's softmax of the last axis is the faster one


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

    def on(self, host: Host) -> Pass:
        """Return the way through the layers for one host."""
        return Pass(self, host)


@final
class Pass:
    """Forward and backward with the weights of a host."""

    def __init__(self, network: Network, host: Host) -> None:
        self._host, self._slope = host, _LOSSES[network.loss]
        self._links = [(layer, _KERNELS[type(layer)]) for layer in network.chain]
        wanted = [any(map(host.wants, parameters(layer))) for layer in network.chain]
        # below the first layer that learns nobody needs a gradient
        self._first = wanted.index(True) if True in wanted else len(wanted)

    def run(self, step: Step) -> None:
        """Land the gradients of all weights that the host wants; they may move at once."""
        host, traces, value = self._host, [], step.x
        for layer, kernel in self._links:
            traces.append(kernel.forward(layer, host, value, step.key))
            value = traces[-1].output
        gradient = self._slope(value, step.y, step.scale)
        for at in range(len(traces) - 1, self._first - 1, -1):
            layer, kernel = self._links[at]
            gradient = kernel.backward(layer, host, traces[at], gradient, at > self._first)


def _cross_entropy(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of sum(scale * l) in the output; `scale` is [clients, rows]."""
    if output.shape[-1] < _WIDE:
        gradient = torch.softmax(output.mT, 1).mT
    else:
        gradient = torch.softmax(output, -1)
    shares = scale.unsqueeze(2)
    return gradient.mul_(shares).scatter_add_(2, y.unsqueeze(2), -shares)


def _squared_error(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the same for the mean of the squares of a row."""
    gap = output.reshape(y.shape) - y
    share = scale * (2 / y[0, 0].numel())
    return gap.mul_(share.reshape(*share.shape, *(1,) * (y.ndim - 2))).reshape(output.shape)


_LOSSES = {"cross-entropy": _cross_entropy, "mse": _squared_error}
