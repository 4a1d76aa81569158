"""Convolutions of all clients as one convolution with a group of channels for each client.

With the channels last in memory this is the fastest form on a processor: faster than a
convolution for each client, and than products with unfolded images, except for very small
images (measured from 2 x 2 to 32 x 32; docs/adr/0003).
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.nn.layer_chain import Conv, Pair
from parsifl.solvers.fused.layer import FusedLayer, ParameterStore, landing, merged, parted, read

# ruff: noqa: ARG002 - all stages have one signature


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


# ruff: noqa: ARG002 - all stages have one signature


@final
class UnfoldedStage:
    """Every position of the output is a row of a linear layer."""

    def __init__(self, layer: Conv, host: ParameterStore) -> None:
        self._layer, self._weight = layer, host.read(layer.weight)
        self._bias = read(host, layer.bias)
        self._land, self._land_bias = host.landing(layer.weight), landing(host, layer.bias)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Unfold the images into columns [clients, rows * positions, entries of a window]."""
        weight, (clients, rows) = self._weight, value.shape[:2]
        size = output_size(self._layer, weight, value)
        self._value, self._columns = value, _columns(self._layer, weight, value, size)
        flat = weight.flatten(2).transpose(1, 2)
        if self._bias is None:
            output = torch.bmm(self._columns, flat)
        else:
            output = torch.baddbmm(self._bias[:, None], self._columns, flat)
        return output.view(clients, rows, *size, -1).permute(0, 1, 4, 2, 3)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Land as a linear layer does, and fold the gradient of the columns."""
        rows = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
        found = gradient
        if below:
            columns = torch.bmm(rows, self._weight.flatten(2))
            found = _folded(self._layer, self._weight, self._value, columns)
        if self._land is not None:
            self._land(rows.transpose(1, 2), self._columns)
        if self._land_bias is not None:
            self._land_bias(rows.sum(1), None)
        return found


def output_size(layer: Conv, weight: Tensor, value: Tensor) -> Pair:
    """Return height and width of the output."""
    height, width = (
        (value.shape[axis] + 2 * padding - dilation * (weight.shape[axis] - 1) - 1) // stride + 1
        for axis, padding, dilation, stride in zip(
            (3, 4), layer.padding, layer.dilation, layer.stride, strict=True
        )
    )
    return height, width


def _columns(layer: Conv, weight: Tensor, value: Tensor, size: Pair) -> Tensor:
    (tall, wide), (high, broad) = layer.padding, layer.stride
    padded = torch.nn.functional.pad(value, (wide, wide, tall, tall))
    clients, rows, channel, down, right = padded.stride()
    shape = (*value.shape[:2], *size, *weight.shape[2:])
    strides = (clients, rows, down * high, right * broad, channel,
               down * layer.dilation[0], right * layer.dilation[1])  # fmt: skip
    windows = padded.as_strided(shape, strides, padded.storage_offset())
    return windows.reshape(len(value), -1, weight[0, 0].numel())


def _folded(layer: Conv, weight: Tensor, value: Tensor, columns: Tensor) -> Tensor:
    """Add up what every window says about an entry of the images."""
    clients, rows, channels, *inner = value.shape
    (tall, wide), (height, width) = layer.padding, inner
    found = value.new_zeros(clients, rows, channels, height + 2 * tall, width + 2 * wide)
    size = output_size(layer, weight, value)
    parts = columns.view(clients, rows, *size, *weight.shape[2:]).permute(5, 6, 0, 1, 4, 2, 3)
    for i in range(weight.shape[3]):
        down = _window(i, layer.dilation[0], layer.stride[0], size[0])
        for j in range(weight.shape[4]):
            right = _window(j, layer.dilation[1], layer.stride[1], size[1])
            found[..., down, right].add_(parts[i, j])
    return found[..., tall : tall + height, wide : wide + width]


def _window(at: int, dilation: int, stride: int, count: int) -> slice:
    start = at * dilation
    return slice(start, start + stride * (count - 1) + 1, stride)
