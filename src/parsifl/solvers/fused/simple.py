"""Linear layers, embeddings, activations, flattening and dropout."""

# ruff: noqa: ARG002 - all kernels have one signature
from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from parsifl import keys
from parsifl.problems.layers import Activate, Dropout, Embed, Flatten, Linear
from parsifl.solvers.fused.kernel import Host, Trace, land_sum

_aten: Any = torch.ops.aten


@final
class LinearKernel:
    """y = x W^T + b on the last axis; axes between rows and features count as rows."""

    def forward(self, layer: Linear, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Return the affine map."""
        rows = value if value.ndim == 3 else value.flatten(1, -2)
        output = torch.bmm(rows, host.read(layer.weight).mT)
        if layer.bias is not None:
            output.add_(host.read(layer.bias).unsqueeze(1))
        if value.ndim != 3:
            output = output.view(*value.shape[:-1], -1)
        return Trace(value, output, rows)

    def backward(
        self, layer: Linear, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land g^T x, and return g W."""
        rows = gradient if gradient.ndim == 3 else gradient.flatten(1, -2)
        found = torch.bmm(rows, host.read(layer.weight)) if below else gradient
        if host.wants(layer.weight):
            host.land(layer.weight, rows.mT, trace.kept)
        land_sum(host, layer.bias, rows, (1,))
        return found.view(trace.value.shape) if below and gradient.ndim != 3 else found


@final
class EmbedKernel:
    """Rows of a table."""

    def forward(self, layer: Embed, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Look the rows up."""
        table = host.read(layer.weight)
        clients, size, width = table.shape
        offsets = torch.arange(0, clients * size, size, device=value.device)
        at = (value.flatten(1) + offsets[:, None]).flatten()
        output = table.reshape(-1, width).index_select(0, at)
        return Trace(value, output.view(*value.shape, width), at)

    def backward(
        self, layer: Embed, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Add up the gradients of each row of the table; nothing lies below."""
        if host.wants(layer.weight):
            table = host.read(layer.weight)
            found = gradient.new_zeros(table.shape)
            found.view(-1, table.shape[2]).index_add_(0, trace.kept, gradient.flatten(0, -2))
            if layer.padding is not None:
                found[:, layer.padding] = 0
            host.land(layer.weight, found, None)
        return gradient


@final
class ActivateKernel:
    """Elementwise functions whose derivative follows from their output."""

    def forward(self, layer: Activate, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Apply the function."""
        if layer.function == "relu":
            return Trace(value, value.relu())
        return Trace(value, value.tanh() if layer.function == "tanh" else value.sigmoid())

    def backward(
        self, layer: Activate, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Multiply by the derivative."""
        found: Tensor
        if layer.function == "relu":
            found = _aten.threshold_backward.grad_input(
                gradient, trace.output, 0, grad_input=gradient
            )
        elif layer.function == "tanh":
            found = _aten.tanh_backward(gradient, trace.output)
        else:
            found = _aten.sigmoid_backward(gradient, trace.output)
        return found


@final
class FlattenKernel:
    """One axis behind the rows."""

    def forward(self, layer: Flatten, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Join the axes."""
        return Trace(value, value.flatten(2))

    def backward(
        self, layer: Flatten, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Part them again."""
        return gradient.reshape(trace.value.shape)


@final
class DropoutKernel:
    """The masks of `KeyedDropout`: the same numbers as in every other executor."""

    def forward(self, layer: Dropout, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Drop entries and scale the others."""
        if layer.p == 0.0 or key is None:
            return Trace(value, value)
        if layer.p == 1.0:
            return Trace(value, torch.zeros_like(value), value.new_zeros(()))
        shape = tuple(value.shape[1:])
        if layer.channels:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        drawn = torch.stack([keys.uniform(one, shape, layer.salt) for one in key])
        factor = (drawn >= layer.p).to(value.dtype) / (1.0 - layer.p)
        return Trace(value, value * factor, factor)

    def backward(
        self, layer: Dropout, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Multiply by the same factors."""
        return gradient if trace.kept is None else gradient * trace.kept
