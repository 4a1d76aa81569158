"""Convolutions of small pictures as products with unfolded pictures, whose step lands directly."""

# ruff: noqa: ARG002 - all kernels have one signature
from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from parsifl.problems.layers import Conv, Pair
from parsifl.solvers.fused.kernel import Host, Trace, land_sum


@final
class UnfoldedKernel:
    """Every position of the output is a row of a linear layer."""

    def forward(self, layer: Conv, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Unfold the pictures into columns [clients, rows * positions, entries of a window]."""
        weight = host.read(layer.weight)
        clients, rows = value.shape[:2]
        height, width = output_size(layer, weight, value)
        columns = _columns(layer, weight, value, (height, width))
        flat = weight.flatten(2).transpose(1, 2)
        if layer.bias is None:
            output = torch.bmm(columns, flat)
        else:
            output = torch.baddbmm(host.read(layer.bias)[:, None], columns, flat)
        pictures = output.view(clients, rows, height, width, -1).permute(0, 1, 4, 2, 3)
        return Trace(value, pictures, columns)

    def backward(
        self, layer: Conv, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land as a linear layer does, and fold the gradient of the columns."""
        weight = host.read(layer.weight)
        rows = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
        found = gradient
        if below:
            columns = torch.bmm(rows, weight.flatten(2))
            found = _folded(layer, weight, trace.value, columns)
        if host.wants(layer.weight):
            host.land(layer.weight, rows.transpose(1, 2), trace.kept)
        land_sum(host, layer.bias, rows, (1,))
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
    """Add up what every window says about an entry of the pictures."""
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
