"""A chain of layers for a block of clients: forward, and backward without autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from parsifl.nn import layer_chain
from parsifl.nn.layer_chain import Chain, Layer, parameters
from parsifl.nn.losses import Loss
from parsifl.solvers.fused.layers import (
    ActivateStage,
    AdaptivePoolStage,
    ConvStage,
    DropoutStage,
    EmbedStage,
    FlattenStage,
    FusedLayer,
    GroupNormStage,
    LayerNormStage,
    LinearStage,
    ParameterStore,
    PoolStage,
)
from parsifl.solvers.fused.schedule import Step

_STAGES: dict[type[Any], Callable[[Any, ParameterStore], FusedLayer]] = {
    layer_chain.Linear: LinearStage,
    layer_chain.Conv: ConvStage,
    layer_chain.Embed: EmbedStage,
    layer_chain.GroupNorm: GroupNormStage,
    layer_chain.LayerNorm: LayerNormStage,
    layer_chain.Pool: PoolStage,
    layer_chain.AdaptivePool: AdaptivePoolStage,
    layer_chain.Dropout: DropoutStage,
    layer_chain.Activate: ActivateStage,
    layer_chain.Flatten: FlattenStage,
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
        return any(isinstance(layer, layer_chain.Dropout) for layer in self.chain)

    def opening(self, trained: Collection[str]) -> str | None:
        """Return the weight of the first trainable layer if it is linear and trained."""
        for layer in self.chain:
            if not set(parameters(layer)).isdisjoint(trained):
                if isinstance(layer, layer_chain.Linear) and layer.weight in trained:
                    return layer.weight
                break
        return None

    def on(self, host: ParameterStore) -> Pass:
        """Return the forward and backward pass for one host."""
        return Pass(self, host)


@final
class Pass:
    """Forward and backward with the weights of a host."""

    def __init__(self, network: Network, host: ParameterStore) -> None:
        stages = [_STAGES[type(layer)](layer, host) for layer in network.chain]
        for below, stage in pairwise(stages):
            if isinstance(stage, ActivateStage):
                stage.overwrites = isinstance(below, LinearStage | ConvStage)
        learning = [_learns(layer, host) for layer in network.chain]
        # no gradient is needed below the first trainable layer
        first = learning.index(True) if True in learning else len(stages)
        self._up = [stage.forward for stage in stages]
        self._down = [(stage.backward, at > first) for at, stage in enumerate(stages)][first:][::-1]
        self._slope = _LOSSES[network.loss]

    def run(self, step: Step) -> None:
        """Pass the gradients of requested weights to the host, which may update them at once."""
        value = step.x
        for forward in self._up:
            value = forward(value, step.key)
        gradient = self._slope(value, step.y, step.scale)
        for backward, below in self._down:
            gradient = backward(gradient, below)


def _learns(layer: Layer, host: ParameterStore) -> bool:
    return any(host.landing(name) is not None for name in parameters(layer))


def _cross_entropy(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of sum(scale * l) in the output; `scale` is [clients, rows]."""
    # along the last axis: along others the last bit depends on how threads divide the rows
    gradient, shares = torch.softmax(output, -1), scale.unsqueeze(2)
    return gradient.mul_(shares).scatter_add_(2, y.unsqueeze(2), -shares)


def _squared_error(output: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the same for the mean of the squares of a row."""
    gap = output.reshape(y.shape) - y
    share = scale * (2 / y[0, 0].numel())
    return gap.mul_(share.reshape(*share.shape, *(1,) * (y.ndim - 2))).reshape(output.shape)


_LOSSES = {"cross-entropy": _cross_entropy, "mse": _squared_error}
