"""Convolutions of all clients as one convolution with a group of channels for each client.

With the channels last in memory this is the fastest form on a processor: faster than a
convolution for each client, and than products with unfolded images, except for very small
images (measured from 2 x 2 to 32 x 32; docs/adr/0003).
"""

# ruff: noqa: ARG002 - all stages have one signature
from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.nn.chain_layers import Conv
from parsifl.solvers.fused.im2col import UnfoldedStage, output_size
from parsifl.solvers.fused.layer import FusedLayer, ParameterStore, landing, merged, parted, read

_aten: Any = torch.ops.aten
_SMALL = 8  # positions of the output from which on a grouped convolution is faster


@final
class ConvStage:
    """A grouped convolution, unless the images are small."""

    def __init__(self, layer: Conv, host: ParameterStore) -> None:
        self._layer, self._host = layer, host

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Convolve in the way that suits the images, which have one size in all steps."""
        if not hasattr(self, "_way"):
            height, width = output_size(self._layer, self._host.read(self._layer.weight), value)
            form = UnfoldedStage if height * width <= _SMALL else GroupedStage
            self._way: FusedLayer = form(self._layer, self._host)
        return self._way.forward(value, key)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Go back the same way."""
        return self._way.backward(gradient, below)


@final
class GroupedStage:
    """The channels of all clients are those of one image."""

    def __init__(self, layer: Conv, host: ParameterStore) -> None:
        self._form = (layer.stride, layer.padding, layer.dilation)
        self._weight, self._bias = host.read(layer.weight), read(host, layer.bias)
        self._land, self._land_bias = host.landing(layer.weight), landing(host, layer.bias)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Convolve, and remember the images with the channels last."""
        self._images = merged(value).contiguous(memory_format=torch.channels_last)
        bias = None if self._bias is None else self._bias.flatten()
        weight, clients = self._weight.flatten(0, 1), len(value)
        return parted(torch.conv2d(self._images, weight, bias, *self._form, clients), clients)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Land the gradients of weight and bias, and return that of the images."""
        clients, weight = len(gradient), self._weight
        for_images, for_weight, for_bias = _aten.convolution_backward(
            merged(gradient).contiguous(memory_format=torch.channels_last),
            self._images,
            weight.flatten(0, 1),
            None if self._bias is None else [clients * weight.shape[1]],
            *self._form,
            False,
            (0, 0),
            clients,
            (below, self._land is not None, self._land_bias is not None),
        )
        if self._land is not None:
            self._land(for_weight.view_as(weight), None)
        if self._land_bias is not None:
            self._land_bias(for_bias.view(clients, -1), None)
        return parted(for_images, clients) if below else gradient
