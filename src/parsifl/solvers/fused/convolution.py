"""Convolutions of all clients as one convolution with a group of channels for each client.

With the channels last in memory this is the fastest form on a processor: faster than a
convolution for each client, and than products with unfolded pictures, except for very small
pictures (measured from 2 x 2 to 32 x 32; docs/adr/0003).
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.problems.layers import Conv
from parsifl.solvers.fused.kernel import Host, Trace, merged, parted
from parsifl.solvers.fused.unfolded import UnfoldedKernel, output_size

_aten: Any = torch.ops.aten
_SMALL = 8  # positions of the output from which on a grouped convolution is faster
_UNFOLDED = UnfoldedKernel()


@final
class ConvKernel:
    """A grouped convolution, unless the pictures are small."""

    def forward(self, layer: Conv, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Convolve, and remember the pictures with the channels last."""
        if _small(layer, host, value):
            return _UNFOLDED.forward(layer, host, value, key)
        pictures = merged(value).contiguous(memory_format=torch.channels_last)
        weight = host.read(layer.weight).flatten(0, 1)
        bias = None if layer.bias is None else host.read(layer.bias).flatten()
        shape = (layer.stride, layer.padding, layer.dilation)
        output = torch.conv2d(pictures, weight, bias, *shape, len(value))
        return Trace(value, parted(output, len(value)), pictures)

    def backward(
        self, layer: Conv, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land the gradients of weight and bias, and return that of the pictures."""
        if _small(layer, host, trace.value):
            return _UNFOLDED.backward(layer, host, trace, gradient, below)
        clients, weight = len(gradient), host.read(layer.weight)
        wanted = (
            below,
            host.wants(layer.weight),
            layer.bias is not None and host.wants(layer.bias),
        )
        for_pictures, for_weight, for_bias = _aten.convolution_backward(
            merged(gradient).contiguous(memory_format=torch.channels_last),
            trace.kept,
            weight.flatten(0, 1),
            None if layer.bias is None else [clients * weight.shape[1]],
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            (0, 0),
            clients,
            wanted,
        )
        if wanted[1]:
            host.land(layer.weight, for_weight.view_as(weight), None)
        if layer.bias is not None and wanted[2]:
            host.land(layer.bias, for_bias.view(clients, -1), None)
        return parted(for_pictures, clients) if below else gradient


def _small(layer: Conv, host: Host, value: Tensor) -> bool:
    height, width = output_size(layer, host.read(layer.weight), value)
    return height * width <= _SMALL
