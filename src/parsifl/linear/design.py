"""Design matrices, dense or CSR, behind one interface: no other module distinguishes them.

Functions whose arguments have a leading client axis ([clients, ...]) work on eager batches of
clients (see `parsifl.core._functorch.eager`): they read pooled rows by number without copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core.batching import Batches
from parsifl.core.tree import Opaque
from parsifl.linear.sparsity.coordinates import places


class CsrDesign(Opaque):
    """A SciPy CSR matrix as a leaf, with row selection and products; it is never made dense."""

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
        """Return the matrix in another dtype (itself if the dtype is the same)."""
        return CsrDesign(self.matrix.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False))

    def matvec(self, coefficients: Tensor) -> Tensor:
        """Return X v for v [d], or X W' for W [classes, d]; differentiable."""
        result: Tensor = _CsrProduct.apply(coefficients, self)  # type: ignore[no-untyped-call]  # torch
        return result

    def rmatvec(self, values: Tensor) -> Tensor:
        """Return X' r for r [n], or R' X for R [n, classes]; differentiable."""
        result: Tensor = _CsrAdjoint.apply(values, self)  # type: ignore[no-untyped-call]  # torch
        return result

    def product(self, coefficients: Tensor) -> Tensor:
        """Return the result of `matvec`, not differentiable but faster."""
        return torch.from_numpy(np.ascontiguousarray(self.matrix @ coefficients.numpy().T))

    def adjoint(self, values: Tensor) -> Tensor:
        """Return the result of `rmatvec`, not differentiable but faster."""
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.design.rmatvec(gradients[0]), None


class _CsrAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(values: Tensor, design: CsrDesign) -> Tensor:
        return design.adjoint(values.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.design = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.design.matvec(gradients[0]), None


Design = Tensor | CsrDesign


def as_design(x: Any) -> Design:
    """Wrap a CSR matrix; return a tensor unchanged."""
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
    gathered_columns = np.empty((*index.shape, rows.shape[1]), pool.dtype)
    # client by client, so that the indices stay in the nearest cache
    for some, start, column in zip(index.numpy(), starts, gathered_columns, strict=True):
        pool.take(np.add.outer(some, start), out=column, mode="clip")
    return torch.from_numpy(gathered_columns).mT


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
    values = coefficients.gather(-1, index) * valid  # an unused position refers to coefficient 0
    return (columns(x, rows, index) @ values[..., None])[..., 0]


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Entries:
    """A few rows as CSR arrays, and their number of columns."""

    starts: Array
    places: Array
    values: Array
    width: int

    def rows(self, chosen: Array) -> Entries:
        """Return a copy of some rows, by their numbers."""
        picked = chosen.astype(self.starts.dtype, copy=False)
        starts = np.zeros(len(picked) + 1, self.starts.dtype)
        np.cumsum(self.starts[picked + 1] - self.starts[picked], out=starts[1:])
        positions = np.empty(starts[-1], self.places.dtype)
        values = np.empty(starts[-1], self.values.dtype)
        _kernels().csr_row_index(
            len(picked), picked, self.starts, self.places, self.values, positions, values
        )
        return Entries(starts, positions, values, self.width)

    def view(self, chosen: Array) -> View:
        """Return some rows, by their numbers (which may repeat), without a copy.

        They are read from last to first: entries between the end of one row and the start of the
        next then count as an empty row.
        """
        order = np.argsort(-chosen, kind="stable")
        falling = chosen[order]
        limits = np.zeros(2 * len(chosen) + 1, self.starts.dtype)
        limits[:-1:2], limits[1::2] = self.starts[falling], self.starts[falling + 1]
        return View(self, order, limits)


@dataclass(frozen=True)
class View:
    """Rows of `entries`: every second one between `limits`, in the order `order`."""

    entries: Entries
    order: Array
    limits: Array

    def product(self, coefficients: Tensor) -> Tensor:
        """Return X v for v [d], or X W' for W [classes, d]."""
        vectors, rows = coefficients.numpy(), len(self.limits) - 1
        arrays = (self.limits, self.entries.places, self.entries.values)
        products = np.zeros((rows, *vectors.shape[:-1]), vectors.dtype)
        if vectors.ndim == 1:
            vector = np.ascontiguousarray(vectors)
            _kernels().csr_matvec(rows, self.entries.width, *arrays, vector, products)
        else:
            sizes = (rows, self.entries.width, len(vectors))
            _kernels().csr_matvecs(*sizes, *arrays, vectors.T.ravel(), products.ravel())
        result = np.empty_like(products[::2])
        result[self.order] = products[::2]
        return torch.from_numpy(result)

    def adjoint(self, residuals: Tensor) -> Tensor:
        """Return X' r for r [n], or R' X for R [n, classes]."""
        vectors, rows = residuals.numpy(), len(self.limits) - 1
        # the arrays of a CSR matrix are those of its transpose in CSC
        arrays = (self.limits, self.entries.places, self.entries.values)
        spread = np.zeros((rows, *vectors.shape[1:]), vectors.dtype)
        spread[::2] = vectors[self.order]
        products = np.zeros((self.entries.width, *vectors.shape[1:]), vectors.dtype)
        if vectors.ndim == 1:
            _kernels().csc_matvec(self.entries.width, rows, *arrays, spread, products)
        else:
            sizes = (self.entries.width, rows, vectors.shape[1])
            _kernels().csc_matvecs(*sizes, *arrays, spread.ravel(), products.ravel())
        return torch.from_numpy(products.T)


@dataclass(frozen=True)
class Compacted:
    """Mini-batches of a CSR design without the columns that do not occur in them.

    Attributes
    ----------
    entries
        The distinct rows of all steps.
    columns
        The numbers of the remaining columns, ascending.
    order
        [steps, rows]: which of the distinct rows a step reads.
    """

    entries: Entries
    columns: Tensor
    order: Array

    def step(self, number: int) -> View:
        """Return the rows of one step."""
        return self.entries.view(self.order[number])


def compacted(batches: Batches, also: Array) -> Compacted:
    """Gather CSR batches without the columns that do not occur in them, except those in `also`.

    `also` marks columns that are always kept.
    """
    index = batches.index.numpy()
    drawn, order = np.unique(index, return_inverse=True)
    matrix = batches.x.matrix
    width, number = matrix.shape[1], np.result_type(matrix.indptr, matrix.indices)
    starts, positions = (a.astype(number, copy=False) for a in (matrix.indptr, matrix.indices))
    part = Entries(starts, positions, matrix.data, width).rows(drawn)
    occurs = also.copy()
    every = np.ones(max(len(part.places), len(drawn)), np.bool_)  # a Boolean product marks columns
    _kernels().csc_matvec(width, len(drawn), part.starts, part.places, every, every, occurs)
    used_columns = np.flatnonzero(occurs)
    new_number = np.empty(width, part.places.dtype)
    new_number[used_columns] = np.arange(len(used_columns), dtype=new_number.dtype)
    small = Entries(part.starts, new_number.take(part.places), part.values, len(used_columns))
    return Compacted(small, torch.from_numpy(used_columns), order.reshape(index.shape))


def _kernels() -> Any:
    """Return the kernels behind SciPy's operators, whose checks cost five times the arithmetic.

    Imported on first use: most clients have dense rows.
    """
    from scipy.sparse import _sparsetools

    return _sparsetools
