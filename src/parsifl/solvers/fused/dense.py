"""Linear layers, embeddings, activations, flattening and dropout."""

# ruff: noqa: ARG002 - all stages have one signature
from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.nn.layer_chain import Activate, Dropout, Embed, Flatten, Linear
from parsifl.solvers.fused.layer import ParameterStore, landing, read

_aten: Any = torch.ops.aten
_FUNCTIONS = {
    "relu": (torch.relu, torch.relu_),
    "tanh": (torch.tanh, torch.tanh_),
    "sigmoid": (torch.sigmoid, torch.sigmoid_),
}


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
        """Land g^T x, and return g W."""
        rows = gradient if gradient.ndim == 3 else gradient.flatten(1, -2)
        found = torch.bmm(rows, self._weight) if below else gradient
        if self._land is not None:
            self._land(rows.mT, self._rows)
        if self._land_bias is not None:
            self._land_bias(self._ones(rows), rows)
        return found.view(self._shape) if below and gradient.ndim != 3 else found

    def _ones(self, rows: Tensor) -> Tensor:
        """Return what adds up the rows in a product: one call for the sum and its step."""
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
        """Look the rows up."""
        width = self._table.shape[2]
        self._at = (value.flatten(1) + self._offsets).flatten()
        output = self._table.reshape(-1, width).index_select(0, self._at)
        return output.view(*value.shape, width)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Add up the gradients of each row of the table; nothing lies below."""
        if self._land is not None:
            found = gradient.new_zeros(self._table.shape)
            rows = gradient.flatten(0, -2)
            found.view(-1, self._table.shape[2]).index_add_(0, self._at, rows)
            if self._padding is not None:
                found[:, self._padding] = 0
            self._land(found, None)
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
        found: Tensor
        if self._function == "relu":
            found = _aten.threshold_backward.grad_input(
                gradient, self._output, 0, grad_input=gradient
            )
        elif self._function == "tanh":
            found = _aten.tanh_backward(gradient, self._output)
        else:
            found = _aten.sigmoid_backward(gradient, self._output)
        return found


@final
class FlattenStage:
    """One axis behind the rows."""

    def __init__(self, layer: Flatten, host: ParameterStore) -> None:
        pass

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Join the axes."""
        self._shape = value.shape
        return value.flatten(2)

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Part them again."""
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
