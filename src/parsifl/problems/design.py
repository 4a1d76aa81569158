"""Design matrices, dense or CSR, behind the same few operations: the only place that branches.

Functions whose arguments have a leading client axis ([clients, ...]) are for eager batches of
clients (see `parsifl.solvers.eager`): they read pooled rows by number and never copy them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from parsifl.tree import Opaque
from parsifl.work import Batches

Array = npt.NDArray[Any]


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


def columns(x: Design, rows: Tensor, index: Tensor) -> Tensor:
    """Return X[rows][:, index] [B, n, k] for every client: rows [B, n], index [B, k]."""
    if isinstance(x, CsrDesign):
        pairs = zip(rows, index, strict=True)
        return torch.stack([x[chosen].columns(some) for chosen, some in pairs])
    flat = x.reshape(len(x), -1)
    width = flat.shape[1]
    return torch.take(flat, (rows * width)[:, :, None] + index[:, None, :])


def products(x: Design, rows: Tensor, coefficients: Tensor) -> Tensor:
    """Return X[rows] v for every client: rows [B, n], v [B, d] or [B, c, d].

    A sparse v reads only the columns of its support.
    """
    used = coefficients != 0
    longest = int(used.sum(-1).max())
    if coefficients.ndim > 2 or 4 * longest > coefficients.shape[-1]:
        pairs = zip(rows, coefficients, strict=True)
        return torch.stack([matvec(x[chosen], v) for chosen, v in pairs])
    if not longest:
        return rows.new_zeros(rows.shape, dtype=coefficients.dtype)
    index = used.nonzero()[:, 1]
    if len(index) == longest * len(used):
        index = index.reshape(len(used), longest)
    else:  # zeros fill up the shorter supports: they add nothing to the product
        index = used.to(torch.uint8).topk(longest).indices
    values = coefficients.gather(-1, index)
    return (columns(x, rows, index) @ values[..., None])[..., 0]


@dataclass(frozen=True)
class Compact:
    """The rows of CSR mini-batches, one after the other, on only the columns that occur.

    Attributes
    ----------
    x, y, weight
        All rows of all steps; step k has the rows k b .. (k + 1) b - 1.
    columns
        The numbers of the columns that are left, ascending.
    rows
        b, the rows a step.
    owner
        For every entry of x the number of its row within its step.
    """

    x: CsrDesign
    y: Tensor
    weight: Tensor
    columns: Tensor
    rows: int
    owner: Array

    def targets(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the targets and weights of the rows of one step."""
        here = slice(number * self.rows, (number + 1) * self.rows)
        return self.y[here], self.weight[here]

    def product(self, number: int, coefficients: Tensor) -> Tensor:
        """Return X v for the rows of one step."""
        if coefficients.ndim > 1:
            return self._step(number).product(coefficients)
        data, place, row = self._entries(number)
        sums = np.bincount(row, data * coefficients.numpy()[place], minlength=self.rows)
        return torch.from_numpy(sums).to(coefficients.dtype)

    def adjoint(self, number: int, values: Tensor) -> Tensor:
        """Return X' r for the rows of one step."""
        if values.ndim > 1:
            return self._step(number).adjoint(values)
        data, place, row = self._entries(number)
        sums = np.bincount(place, data * values.numpy()[row], minlength=len(self.columns))
        return torch.from_numpy(sums).to(values.dtype)

    def _step(self, number: int) -> CsrDesign:
        return self.x[slice(number * self.rows, (number + 1) * self.rows)]

    def _entries(self, number: int) -> tuple[Array, Array, Array]:
        """Return values, columns and rows of the entries of one step, as views.

        On so few rows the arithmetic takes less time than SciPy's checks.
        """
        matrix, first = self.x.matrix, number * self.rows
        here = slice(int(matrix.indptr[first]), int(matrix.indptr[first + self.rows]))
        return matrix.data[here], matrix.indices[here], self.owner[here]


def compact(batches: Batches, also: Tensor) -> Compact:
    """Gather CSR batches without the columns that they never touch, but for those in `also`."""
    index = batches.index.reshape(-1)
    part = batches.x.matrix[index.numpy()]
    occurs = np.zeros(part.shape[1], np.bool_)
    occurs[part.indices] = True
    occurs[also.numpy()] = True
    kept = np.flatnonzero(occurs)
    place = np.empty(part.shape[1], part.indices.dtype)
    place[kept] = np.arange(len(kept), dtype=place.dtype)
    shape = (part.shape[0], len(kept))
    small = type(part)((part.data, place[part.indices], part.indptr), shape=shape)
    return Compact(
        CsrDesign(small),
        batches.y[index],
        batches.weight.reshape(-1),
        torch.from_numpy(kept),
        batches.index.shape[1],
        np.repeat(np.arange(shape[0]) % batches.index.shape[1], np.diff(part.indptr)),
    )
