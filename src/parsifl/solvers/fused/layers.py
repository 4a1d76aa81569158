"""The layers of a fused network: dense, convolution, pooling and normalization.

All values have the axes [clients, rows, ...], all weights a leading axis of clients.
"""

# ruff: noqa: ARG002 - all layers have one signature

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.nn.layer_chain import (
    Activate,
    AdaptivePool,
    Conv,
    Dropout,
    Embed,
    Flatten,
    GroupNorm,
    LayerNorm,
    Linear,
    Pair,
    Pool,
)

_aten: Any = torch.ops.aten
_FUNCTIONS = {
    "relu": (torch.relu, torch.relu_),
    "tanh": (torch.tanh, torch.tanh_),
    "sigmoid": (torch.sigmoid, torch.sigmoid_),
}
_SMALL = 8  # output positions above which a grouped convolution is faster

GradientSink = Callable[[Tensor, Tensor | None], None]
"""Receives a gradient: left @ right, or left itself. It may update the weight in place.

A product has two axes behind that of the clients: the first of the weight, and all others; that of
a vector is one row.
"""


class ParameterStore(Protocol):
    """The owner of the weights, which receives the gradients."""

    def read(self, name: str) -> Tensor:
        """Return a weight of all clients; it changes in place."""

    def landing(self, name: str) -> GradientSink | None:
        """Return the sink of the gradient of a weight; None if it is not needed."""


class FusedLayer(Protocol):
    """One layer with the weights of a host; constants of all steps are computed once.

    `forward` stores what `backward` needs. `backward` passes the gradients of its weights to their
    sinks and returns that of its input, or anything if it is not needed (`below` is false).
    It may overwrite the given gradient, and must read its weights before it passes on gradients.
    """

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Return the output; `key` [clients] is that of the mini-batch, for keyed randomness."""

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Pass on the gradients of weights, and return the gradient of the input."""


def read(host: ParameterStore, name: str | None) -> Tensor | None:
    """Return an optional weight."""
    return None if name is None else host.read(name)


def landing(host: ParameterStore, name: str | None) -> GradientSink | None:
    """Return the sink of the gradient of an optional weight."""
    return None if name is None else host.landing(name)


def add_product_(
    target: Tensor, left: Tensor, right: Tensor | None, factor: float, keep: float = 1.0
) -> None:
    """Replace the target by keep * target + factor * left @ right (or factor * left)."""
    if right is not None:
        matrices = _matrices(target)
        if matrices.is_contiguous():
            matrices.baddbmm_(left, right, beta=keep, alpha=factor)
        else:  # transposed in memory: torch would copy it back and forth
            matrices.mT.baddbmm_(right.mT, left.mT, beta=keep, alpha=factor)
    elif keep == 1.0:
        target.add_(left, alpha=factor)
    else:
        target.mul_(keep).add_(left, alpha=factor)


def _matrices(weight: Tensor) -> Tensor:
    if weight.ndim == 2:
        return weight.unsqueeze(1)
    return weight if weight.ndim == 3 else weight.flatten(2)


def merged(value: Tensor) -> Tensor:
    """Return [clients, rows, channels, ...] as [rows, clients * channels, ...].

    Image layers store their output in this order, so this is a view.
    """
    return value.transpose(0, 1).flatten(1, 2)


def parted(value: Tensor, clients: int) -> Tensor:
    """Undo `merged`, as a view."""
    return value.view(len(value), clients, -1, *value.shape[2:]).transpose(0, 1)


@final
class LinearStage:
    """y = x W^T + b on the last axis; axes between rows and features count as rows."""

    def __init__(self, layer: Linear, host: ParameterStore) -> None:
        self._weight = host.read(layer.weight)
        self._across = self._weight.mT
        bias = read(host, layer.bias)
        self._bias = None if bias is None else bias.unsqueeze(1)
        self._land = host.landing(layer.weight)
        self._land_bias = landing(host, layer.bias)
        self._sum: Tensor | None = None

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Return the affine map."""
        self._shape = value.shape
        self._rows = value if value.ndim == 3 else value.flatten(1, -2)
        output = torch.bmm(self._rows, self._across)
        if self._bias is not None:
            output.add_(self._bias)
        return output if value.ndim == 3 else output.view(*value.shape[:-1], -1)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Pass on g^T x, and return g W."""
        rows = gradient if gradient.ndim == 3 else gradient.flatten(1, -2)
        below_gradient = torch.bmm(rows, self._weight) if below else gradient
        if self._land is not None:
            self._land(rows.mT, self._rows)
        if self._land_bias is not None:
            self._land_bias(self._ones(rows), rows)
        return below_gradient.view(self._shape) if below and gradient.ndim != 3 else below_gradient

    def _ones(self, rows: Tensor) -> Tensor:
        """Return ones that sum the rows in a product: one call for the sum and its step."""
        if self._sum is None or self._sum.shape[2] != rows.shape[1]:
            self._sum = rows.new_ones(len(rows), 1, rows.shape[1])
        return self._sum


@final
class EmbedStage:
    """Rows of a table."""

    def __init__(self, layer: Embed, host: ParameterStore) -> None:
        self._table, self._padding = host.read(layer.weight), layer.padding
        self._land = host.landing(layer.weight)
        clients, size, _ = self._table.shape
        self._offsets = torch.arange(0, clients * size, size, device=self._table.device)[:, None]

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Look up the rows."""
        width = self._table.shape[2]
        self._at = (value.flatten(1) + self._offsets).flatten()
        output = self._table.reshape(-1, width).index_select(0, self._at)
        return output.view(*value.shape, width)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Sum the gradients of each row of the table; there is no layer below."""
        if self._land is not None:
            table_gradient = gradient.new_zeros(self._table.shape)
            rows = gradient.flatten(0, -2)
            table_gradient.view(-1, self._table.shape[2]).index_add_(0, self._at, rows)
            if self._padding is not None:
                table_gradient[:, self._padding] = 0
            self._land(table_gradient, None)
        return gradient


@final
class ActivateStage:
    """Elementwise functions whose derivative follows from their output."""

    overwrites = False
    """Whether the input is used only here, so that the output may overwrite it."""

    def __init__(self, layer: Activate, host: ParameterStore) -> None:
        self._function = layer.function

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Apply the function."""
        fresh, in_place = _FUNCTIONS[self._function]
        self._output = in_place(value) if self.overwrites else fresh(value)
        return self._output

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Multiply by the derivative."""
        input_gradient: Tensor
        if self._function == "relu":
            input_gradient = _aten.threshold_backward.grad_input(
                gradient, self._output, 0, grad_input=gradient
            )
        elif self._function == "tanh":
            input_gradient = _aten.tanh_backward(gradient, self._output)
        else:
            input_gradient = _aten.sigmoid_backward(gradient, self._output)
        return input_gradient


@final
class FlattenStage:
    """Flattens all axes after the rows."""

    def __init__(self, layer: Flatten, host: ParameterStore) -> None:
        pass

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Join the axes."""
        self._shape = value.shape
        return value.flatten(2)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Restore the axes."""
        return gradient.reshape(self._shape)


@final
class DropoutStage:
    """The masks of `KeyedDropout`: the same numbers as in every other executor."""

    def __init__(self, layer: Dropout, host: ParameterStore) -> None:
        self._layer = layer
        self._factor: Tensor | None = None

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Drop entries and scale the others."""
        layer = self._layer
        if layer.p == 0.0 or key is None:
            self._factor = None
            return value
        if layer.p == 1.0:
            self._factor = value.new_zeros(())
            return torch.zeros_like(value)
        shape = tuple(value.shape[1:])
        if layer.channels:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        drawn = torch.stack([keys.uniform(one, shape, layer.salt) for one in key])
        self._factor = (drawn >= layer.p).to(value.dtype) / (1.0 - layer.p)
        return value * self._factor

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Multiply by the same factors."""
        return gradient if self._factor is None else gradient * self._factor


@final
class PoolStage:
    """Moving windows; the channels of all clients form one image."""

    def __init__(self, layer: Pool, host: ParameterStore) -> None:
        self._kind, self._window = layer.kind, (layer.kernel, layer.stride, layer.padding)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Pool, and store the positions of the maxima."""
        self._images = merged(value)
        if self._kind == "max":
            output, self._where = _aten.max_pool2d_with_indices(self._images, *self._window)
        else:
            output = _aten.avg_pool2d(self._images, *self._window)
        return parted(output, len(value))

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Send gradients to the maxima, or spread them over the window."""
        inputs = (merged(gradient), self._images, *self._window)
        if self._kind == "max":
            spread = _aten.max_pool2d_with_indices_backward(*inputs, (1, 1), False, self._where)
        else:
            spread = _aten.avg_pool2d_backward(*inputs, False, True, None)
        return parted(spread, len(gradient))


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
        input_gradient = _aten._adaptive_avg_pool2d_backward(merged(gradient), self._images)
        return parted(input_gradient, len(gradient))


@final
class GroupNormStage:
    """The groups of all clients form the groups of one row."""

    def __init__(self, layer: GroupNorm, host: ParameterStore) -> None:
        self._groups, self._eps = layer.groups, layer.eps
        self._weight, self._bias = read(host, layer.weight), read(host, layer.bias)
        self._landings = (landing(host, layer.weight), landing(host, layer.bias))

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Normalise, and store means and deviations."""
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
        input_gradient, *affine = _aten.native_group_norm_backward(
            above, *self._kept, *_sizes(rows), clients * self._groups, wanted
        )
        for land, affine_gradient in zip(self._landings, affine, strict=True):
            if land is not None:
                land(affine_gradient.view(clients, -1), None)
        return parted(input_gradient, clients) if below else gradient


@final
class LayerNormStage:
    """Normalisation without weights for all clients at once, then each client's own scale."""

    def __init__(self, layer: LayerNorm, host: ParameterStore) -> None:
        self._shape, self._eps = layer.shape, layer.eps
        self._weight, self._bias = read(host, layer.weight), read(host, layer.bias)
        self._land, self._land_bias = landing(host, layer.weight), landing(host, layer.bias)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Normalise, and store the normalised values, means and deviations."""
        rows = value.contiguous()
        output, *statistics = torch.native_layer_norm(rows, self._shape, None, None, self._eps)
        self._normed, self._kept = output, (rows, self._shape, *statistics)
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
        input_gradient: Tensor = _aten.native_layer_norm_backward(
            above.contiguous(), *self._kept, None, None, (True, False, False)
        )[0]
        return input_gradient

    def _aligned(self, weight: Tensor, value: Tensor) -> Tensor:
        """Give a weight the axes of the values that it scales."""
        between = (1,) * (value.ndim - 1 - len(self._shape))
        return weight.reshape(len(weight), *between, *self._shape)


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    return rows.shape[0], rows.shape[1], rows[0, 0].numel()


def _memory(rows: Tensor) -> torch.memory_format:
    last = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


# ruff: noqa: ARG002 - all stages have one signature


@final
class ConvStage:
    """A grouped convolution, unless the images are small."""

    def __init__(self, layer: Conv, host: ParameterStore) -> None:
        self._layer, self._host = layer, host

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Convolve in the faster way for this image size, which is the same in all steps."""
        if not hasattr(self, "_way"):
            height, width = output_size(self._layer, self._host.read(self._layer.weight), value)
            form = UnfoldedStage if height * width <= _SMALL else GroupedStage
            self._way: FusedLayer = form(self._layer, self._host)
        return self._way.forward(value, key)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Use the same way backwards."""
        return self._way.backward(gradient, below)


@final
class GroupedStage:
    """The channels of all clients form one image."""

    def __init__(self, layer: Conv, host: ParameterStore) -> None:
        self._form = (layer.stride, layer.padding, layer.dilation)
        self._weight, self._bias = host.read(layer.weight), read(host, layer.bias)
        self._land, self._land_bias = host.landing(layer.weight), landing(host, layer.bias)

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Convolve, and store the images with channels last."""
        self._images = merged(value).contiguous(memory_format=torch.channels_last)
        bias = None if self._bias is None else self._bias.flatten()
        weight, clients = self._weight.flatten(0, 1), len(value)
        return parted(torch.conv2d(self._images, weight, bias, *self._form, clients), clients)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Pass on the gradients of weight and bias, and return that of the images."""
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
        """Proceed as a linear layer, and fold the gradient of the columns."""
        rows = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
        below_gradient = gradient
        if below:
            columns = torch.bmm(rows, self._weight.flatten(2))
            below_gradient = _folded(self._layer, self._weight, self._value, columns)
        if self._land is not None:
            self._land(rows.transpose(1, 2), self._columns)
        if self._land_bias is not None:
            self._land_bias(rows.sum(1), None)
        return below_gradient


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
    """Sum the gradients of all windows that contain an entry of the images."""
    clients, rows, channels, *inner = value.shape
    (tall, wide), (height, width) = layer.padding, inner
    images = value.new_zeros(clients, rows, channels, height + 2 * tall, width + 2 * wide)
    size = output_size(layer, weight, value)
    parts = columns.view(clients, rows, *size, *weight.shape[2:]).permute(5, 6, 0, 1, 4, 2, 3)
    for i in range(weight.shape[3]):
        down = _window(i, layer.dilation[0], layer.stride[0], size[0])
        for j in range(weight.shape[4]):
            right = _window(j, layer.dilation[1], layer.stride[1], size[1])
            images[..., down, right].add_(parts[i, j])
    return images[..., tall : tall + height, wide : wide + width]


def _window(at: int, dilation: int, stride: int, count: int) -> slice:
    start = at * dilation
    return slice(start, start + stride * (count - 1) + 1, stride)
