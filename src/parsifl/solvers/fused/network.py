"""A chain of layers for a block of clients: forward, and backward without autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from parsifl.nn import chain_layers
from parsifl.nn.chain_layers import Chain, Layer, parameters
from parsifl.nn.row_losses import Loss
from parsifl.solvers.fused.convolution import FusedConv
from parsifl.solvers.fused.dense import (
    FusedActivate,
    FusedDropout,
    FusedEmbed,
    FusedFlatten,
    FusedLinear,
)
from parsifl.solvers.fused.layer import FusedLayer, ParameterStore
from parsifl.solvers.fused.pooling_norm import (
    FusedAdaptivePool,
    FusedGroupNorm,
    FusedLayerNorm,
    FusedPool,
)
from parsifl.solvers.fused.schedule import Step

_LAYERS: dict[type[Any], Callable[[Any, ParameterStore], FusedLayer]] = {
    chain_layers.Linear: FusedLinear,
    chain_layers.Conv: FusedConv,
    chain_layers.Embed: FusedEmbed,
    chain_layers.GroupNorm: FusedGroupNorm,
    chain_layers.LayerNorm: FusedLayerNorm,
    chain_layers.Pool: FusedPool,
    chain_layers.AdaptivePool: FusedAdaptivePool,
    chain_layers.Dropout: FusedDropout,
    chain_layers.Activate: FusedActivate,
    chain_layers.Flatten: FusedFlatten,
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
        return any(isinstance(layer, chain_layers.Dropout) for layer in self.chain)

    def opening(self, trained: Collection[str]) -> str | None:
        """Name the weight of the first layer that learns, if it is linear and this is trained."""
        for layer in self.chain:
            if not set(parameters(layer)).isdisjoint(trained):
                if isinstance(layer, chain_layers.Linear) and layer.weight in trained:
                    return layer.weight
                break
        return None

    def on(self, store: ParameterStore) -> Pass:
        """Return the way through the layers for one store."""
        return Pass(self, store)


@final
class Pass:
    """Forward and backward with the weights of a store."""

    def __init__(self, network: Network, store: ParameterStore) -> None:
        layers = [_LAYERS[type(layer)](layer, store) for layer in network.chain]
        for below, layer in pairwise(layers):
            if isinstance(layer, FusedActivate):
                layer.overwrites = isinstance(below, FusedLinear | FusedConv)
        learning = [_learns(layer, store) for layer in network.chain]
        # below the first layer that learns no gradient is needed
        first = learning.index(True) if True in learning else len(layers)
        self._up = [layer.forward for layer in layers]
        self._down = [(layer.backward, at > first) for at, layer in enumerate(layers)][first:][::-1]
        self._slope = _LOSSES[network.loss]

    def run(self, step: Step) -> None:
        """Pass on the gradients of all weights that the store wants; they may move at once."""
        value = step.x
        for forward in self._up:
            value = forward(value, step.key)
        gradient = self._slope(value, step.y, step.scale)
        for backward, below in self._down:
            gradient = backward(gradient, below)


def _learns(layer: Layer, store: ParameterStore) -> bool:
    return any(store.sink(name) is not None for name in parameters(layer))


def _cross_entropy(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of sum(scale * l) in the output; `scale` is [clients, rows]."""
    # along the last axis: along another one the last bit depends on how threads share the rows
    gradient, shares = torch.softmax(output, -1), scale.unsqueeze(2)
    return gradient.mul_(shares).scatter_add_(2, y.unsqueeze(2), -shares)


def _squared_error(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the same for the mean of the squares of a row."""
    gap = output.reshape(y.shape) - y
    share = scale * (2 / y[0, 0].numel())
    return gap.mul_(share.reshape(*share.shape, *(1,) * (y.ndim - 2))).reshape(output.shape)


_LOSSES = {"cross-entropy": _cross_entropy, "mse": _squared_error}
