"""Design matrices, dense or CSR, behind the same few operations: the only place that branches.

Functions whose arguments have a leading client axis ([clients, ...]) serve eager batches of clients
(see `parsifl.core._functorch.eager`): they read pooled rows by number and never copy them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core.tree import Opaque
from parsifl.linear.sparsity.coordinates import places


class CsrDesign(Opaque):
    """A SciPy CSR matrix as a leaf: rows are selected, products taken, never made dense."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, rows: Tensor | slice) -> CsrDesign:
        return CsrDesign(self.matrix[rows if isinstance(rows, slice) else rows.numpy()])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.matrix.shape
        return int(rows), int(columns)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""
        return torch.from_numpy(self.matrix.data[:0]).dtype

    def to(self, dtype: torch.dtype) -> CsrDesign:
        """Return the matrix with entries of another dtype (itself if it has it already)."""
        return CsrDesign(self.matrix.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False))

    def matvec(self, coefficients: Tensor) -> Tensor:
        """Return X v for v [d], or X W' for W [classes, d]; it can be differentiated."""
        result: Tensor = _CsrProduct.apply(coefficients, self)  # type: ignore[no-untyped-call]  # torch
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        """Return X' r for r [n], or R' X for R [n, classes]; it can be differentiated."""
        result: Tensor = _CsrAdjoint.apply(values, self)  # type: ignore[no-untyped-call]  # torch
        return result

    def product(self, coefficients: Tensor) -> Tensor:
        """Return what `matvec` returns, without the cost of being differentiable."""
        return torch.from_numpy(np.ascontiguousarray(self.matrix @ coefficients.numpy().T))

    def adjoint(self, values: Tensor) -> Tensor:
        """Return what `rmatvec` returns, without the cost of being differentiable."""
        # the transpose of a CSR matrix is a CSC view of the same arrays: nothing is copied
        return torch.from_numpy(np.ascontiguousarray((self.matrix.T @ values.numpy()).T))

    def columns(self, index: Tensor) -> Tensor:
        """Return some columns, dense."""
        return torch.from_numpy(self.matrix[:, index.numpy()].toarray())


class _CsrProduct(torch.autograd.Function):
    @staticmethod
    def forward(coefficients: Tensor, design: CsrDesign) -> Tensor:
        return design.product(coefficients.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.design = inputs[1]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return ctx.design.rmatvec(slopes[0]), None


class _CsrAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, design: CsrDesign) -> Tensor:
        return design.adjoint(values.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.design = inputs[1]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return ctx.design.matvec(slopes[0]), None


Design = Tensor | CsrDesign


def as_design(x: Any) -> Design:
    """Return a tensor as it is and wrap a CSR matrix."""
    return x if isinstance(x, Tensor) else CsrDesign(x)


def matvec(x: Design, coefficients: Tensor) -> Tensor:
    """Return X v for v [d], or X W' for W [classes, d].

    >>> matvec(torch.eye(2), torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    """
    if isinstance(x, CsrDesign):
        return x.matvec(coefficients)
    return (
        x.reshape(len(x), -1) @ coefficients.mT if coefficients.ndim > 1 else _flat(x, coefficients)
    )


def _flat(x: Tensor, coefficients: Tensor) -> Tensor:
    return x.reshape(len(x), -1) @ coefficients


def rmatvec(x: Design, values: Tensor) -> Tensor:
    """Return X' r for r [n], or R' X for R [n, classes]."""
    if isinstance(x, CsrDesign):
        return x.rmatvec(values)
    return values.mT @ x.reshape(len(x), -1) if values.ndim > 1 else values @ x.reshape(len(x), -1)


def combine(x: Design, rows: Tensor, values: Tensor) -> Tensor:
    """Return sum_j values_j X[rows_j] for every client: rows [B, n], values [B, n] or [B, n, c].

    The result is [B, d] or [B, c, d]. A single output reads each row once and copies none.
    """
    if isinstance(x, CsrDesign):
        pairs = zip(rows, values, strict=True)
        return torch.stack([x[chosen].adjoint(value) for chosen, value in pairs])
    flat = x.reshape(len(x), -1)
    if values.ndim == 2:
        return functional.embedding_bag(rows, flat, per_sample_weights=values, mode="sum")
    return torch.stack([v.mT @ flat[chosen] for chosen, v in zip(rows, values, strict=True)])


def gathered(x: Design, rows: Tensor) -> Tensor:
    """Return X[rows] [B, n, d] for every client: rows [B, n]."""
    if isinstance(x, CsrDesign):
        return torch.stack([torch.from_numpy(x[chosen].matrix.toarray()) for chosen in rows])
    return functional.embedding(rows, x.reshape(len(x), -1))  # five times faster than x[rows]


def columns(x: Design, rows: Tensor, index: Tensor) -> Tensor:
    """Return X[rows][:, index] [B, n, k] for every client: rows [B, n], index [B, k]."""
    if isinstance(x, CsrDesign):
        pairs = zip(rows, index, strict=True)
        return torch.stack([x[chosen].columns(some) for chosen, some in pairs])
    flat = x.reshape(len(x), -1)
    if not flat.is_contiguous():  # some columns of a larger matrix
        return flat[rows[:, :, None], index[:, None, :]]
    pool, starts = flat.view(-1).numpy(), rows.numpy() * flat.shape[1]
    found = np.empty((*index.shape, rows.shape[1]), pool.dtype)
    # client by client, so that the numbers of what is read stay in the nearest cache
    for some, start, column in zip(index.numpy(), starts, found, strict=True):
        pool.take(np.add.outer(some, start), out=column, mode="clip")
    return torch.from_numpy(found).mT


def products(x: Design, rows: Tensor, coefficients: Tensor) -> Tensor:
    """Return X[rows] v for every client: rows [B, n], v [B, d] or [B, c, d].

    A sparse v reads only the columns of its support.
    """
    used = coefficients.numpy() != 0
    longest = int(np.count_nonzero(used, axis=-1).max())
    if coefficients.ndim > 2 or 4 * longest > coefficients.shape[-1]:
        pairs = zip(rows, coefficients, strict=True)
        return torch.stack([matvec(x[chosen], v) for chosen, v in pairs])
    if not longest:
        return rows.new_zeros(rows.shape, dtype=coefficients.dtype)
    index, valid = places(torch.from_numpy(used))
    values = coefficients.gather(-1, index) * valid  # an unused place looks up coefficient 0
    return (columns(x, rows, index) @ values[..., None])[..., 0]
