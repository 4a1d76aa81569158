"""Pooling and normalisation of images [clients, rows, channels, height, width]."""

# ruff: noqa: ARG002 - all stages have one signature
from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.nn.layer_chain import AdaptivePool, GroupNorm, LayerNorm, Pool
from parsifl.solvers.fused.layer import ParameterStore, landing, merged, parted, read

_aten: Any = torch.ops.aten


@final
class PoolStage:
    """Moving windows: the channels of all clients are those of one image."""

    def __init__(self, layer: Pool, host: ParameterStore) -> None:
        self._kind, self._window = layer.kind, (layer.kernel, layer.stride, layer.padding)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Pool, and remember where the maxima were."""
        self._images = merged(value)
        if self._kind == "max":
            output, self._where = _aten.max_pool2d_with_indices(self._images, *self._window)
        else:
            output = _aten.avg_pool2d(self._images, *self._window)
        return parted(output, len(value))

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Send gradients to the maxima, or spread them over the window."""
        given = (merged(gradient), self._images, *self._window)
        if self._kind == "max":
            found = _aten.max_pool2d_with_indices_backward(*given, (1, 1), False, self._where)
        else:
            found = _aten.avg_pool2d_backward(*given, False, True, None)
        return parted(found, len(gradient))


@final
class AdaptivePoolStage:
    """Means over the cells of a grid."""

    def __init__(self, layer: AdaptivePool, host: ParameterStore) -> None:
        self._size = layer.size

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Take the means."""
        self._images = merged(value)
        return parted(_aten._adaptive_avg_pool2d(self._images, self._size), len(value))

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Spread gradients over the cells."""
        found = _aten._adaptive_avg_pool2d_backward(merged(gradient), self._images)
        return parted(found, len(gradient))


@final
class GroupNormStage:
    """The groups of all clients are groups of one row."""

    def __init__(self, layer: GroupNorm, host: ParameterStore) -> None:
        self._groups, self._eps = layer.groups, layer.eps
        self._weight, self._bias = read(host, layer.weight), read(host, layer.bias)
        self._landings = (landing(host, layer.weight), landing(host, layer.bias))

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Normalise, and remember means and deviations."""
        clients, rows = len(value), merged(value)
        weight = None if self._weight is None else self._weight.flatten()
        bias = None if self._bias is None else self._bias.flatten()
        output, mean, deviation = torch.native_group_norm(
            rows, weight, bias, *_sizes(rows), clients * self._groups, self._eps
        )
        self._kept = (rows, mean, deviation, weight)
        return parted(output, clients)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Land the gradients of scale and shift; go through the normalisation."""
        clients, rows = len(gradient), self._kept[0]
        wanted = (below, *(land is not None for land in self._landings))
        above = merged(gradient).contiguous(memory_format=_memory(rows))
        found, *affine = _aten.native_group_norm_backward(
            above, *self._kept, *_sizes(rows), clients * self._groups, wanted
        )
        for land, slope in zip(self._landings, affine, strict=True):
            if land is not None:
                land(slope.view(clients, -1), None)
        return parted(found, clients) if below else gradient


@final
class LayerNormStage:
    """Normalisation without weights for all clients at once, then each client's own scale."""

    def __init__(self, layer: LayerNorm, host: ParameterStore) -> None:
        self._shape, self._eps = layer.shape, layer.eps
        self._weight, self._bias = read(host, layer.weight), read(host, layer.bias)
        self._land, self._land_bias = landing(host, layer.weight), landing(host, layer.bias)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Normalise, and remember the normalised values, means and deviations."""
        rows = value.contiguous()
        output, *kept = torch.native_layer_norm(rows, self._shape, None, None, self._eps)
        self._normed, self._kept = output, (rows, self._shape, *kept)
        if self._weight is not None:
            output = output * self._aligned(self._weight, value)
        if self._bias is not None:
            output = output + self._aligned(self._bias, value)
        return output

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Land the gradients of scale and shift; go through the normalisation."""
        above, others = gradient, tuple(range(1, gradient.ndim - len(self._shape)))
        if self._weight is not None:
            above = gradient * self._aligned(self._weight, gradient)
        if self._land is not None:
            self._land((gradient * self._normed).sum(others), None)
        if self._land_bias is not None:
            self._land_bias(gradient.sum(others), None)
        found: Tensor = _aten.native_layer_norm_backward(
            above.contiguous(), *self._kept, None, None, (True, False, False)
        )[0]
        return found

    def _aligned(self, weight: Tensor, value: Tensor) -> Tensor:
        """Give a weight the axes of the values that it scales."""
        between = (1,) * (value.ndim - 1 - len(self._shape))
        return weight.reshape(len(weight), *between, *self._shape)


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    return rows.shape[0], rows.shape[1], rows[0, 0].numel()


def _memory(rows: Tensor) -> torch.memory_format:
    last = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
