"""Pooling and normalisation of pictures [clients, rows, channels, height, width]."""

# ruff: noqa: ARG002 - all kernels have one signature
from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.problems.layers import AdaptivePool, GroupNorm, LayerNorm, Pool
from parsifl.solvers.fused.kernel import Host, Trace, land_sum, merged, parted

_aten: Any = torch.ops.aten


@final
class PoolKernel:
    """Moving windows: the channels of all clients are those of one picture."""

    def forward(self, layer: Pool, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Pool, and remember where the maxima were."""
        pictures = merged(value)
        window = (layer.kernel, layer.stride, layer.padding)
        if layer.kind == "max":
            output, kept = _aten.max_pool2d_with_indices(pictures, *window)
        else:
            output, kept = _aten.avg_pool2d(pictures, *window), None
        return Trace(value, parted(output, len(value)), (pictures, kept))

    def backward(
        self, layer: Pool, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Send gradients to the maxima, or spread them over the window."""
        pictures, where = trace.kept
        given = (merged(gradient), pictures, layer.kernel, layer.stride, layer.padding)
        if layer.kind == "max":
            found = _aten.max_pool2d_with_indices_backward(*given, (1, 1), False, where)
        else:
            found = _aten.avg_pool2d_backward(*given, False, True, None)
        return parted(found, len(gradient))


@final
class AdaptivePoolKernel:
    """Means over the cells of a grid."""

    def forward(self, layer: AdaptivePool, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Take the means."""
        pictures = merged(value)
        output = _aten._adaptive_avg_pool2d(pictures, layer.size)
        return Trace(value, parted(output, len(value)), pictures)

    def backward(
        self, layer: AdaptivePool, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Spread gradients over the cells."""
        found = _aten._adaptive_avg_pool2d_backward(merged(gradient), trace.kept)
        return parted(found, len(gradient))


@final
class GroupNormKernel:
    """The groups of all clients are groups of one row."""

    def forward(self, layer: GroupNorm, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Normalise, and remember means and deviations."""
        clients, rows = len(value), merged(value)
        weight = None if layer.weight is None else host.read(layer.weight).flatten()
        bias = None if layer.bias is None else host.read(layer.bias).flatten()
        output, mean, deviation = torch.native_group_norm(
            rows, weight, bias, *_sizes(rows), clients * layer.groups, layer.eps
        )
        return Trace(value, parted(output, clients), (rows, mean, deviation, weight))

    def backward(
        self, layer: GroupNorm, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land the gradients of scale and shift; go through the normalisation."""
        clients, (rows, *kept) = len(gradient), trace.kept
        wanted = tuple(name is not None and host.wants(name) for name in (layer.weight, layer.bias))
        above = merged(gradient).contiguous(memory_format=_memory(rows))
        found, *affine = _aten.native_group_norm_backward(
            above, rows, *kept, *_sizes(rows), clients * layer.groups, (below, *wanted)
        )
        for name, slope, asked in zip((layer.weight, layer.bias), affine, wanted, strict=True):
            if name is not None and asked:
                host.land(name, slope.view(clients, -1), None)
        return parted(found, clients) if below else gradient


@final
class LayerNormKernel:
    """Normalisation without weights for all clients at once, then each client's own scale."""

    def forward(self, layer: LayerNorm, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Normalise, and remember the normalised values, means and deviations."""
        rows = value.contiguous()
        normed, *kept = torch.native_layer_norm(rows, layer.shape, None, None, layer.eps)
        output = normed
        if layer.weight is not None:
            output = output * _aligned(layer, host.read(layer.weight), value)
        if layer.bias is not None:
            output = output + _aligned(layer, host.read(layer.bias), value)
        return Trace(value, output, (rows, normed, *kept))

    def backward(
        self, layer: LayerNorm, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land the gradients of scale and shift; go through the normalisation."""
        rows, normed, *kept = trace.kept
        above, others = gradient, tuple(range(1, gradient.ndim - len(layer.shape)))
        if layer.weight is not None:
            above = gradient * _aligned(layer, host.read(layer.weight), gradient)
            if host.wants(layer.weight):
                host.land(layer.weight, (gradient * normed).sum(others), None)
        land_sum(host, layer.bias, gradient, others)
        found: Tensor = _aten.native_layer_norm_backward(
            above.contiguous(), rows, layer.shape, *kept, None, None, (True, False, False)
        )[0]
        return found


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    return rows.shape[0], rows.shape[1], rows[0, 0].numel()


def _memory(rows: Tensor) -> torch.memory_format:
    last = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _aligned(layer: LayerNorm, weight: Tensor, value: Tensor) -> Tensor:
    """Give a weight the axes of the values that it scales."""
    between = (1,) * (value.ndim - 1 - len(layer.shape))
    return weight.reshape(len(weight), *between, *layer.shape)
