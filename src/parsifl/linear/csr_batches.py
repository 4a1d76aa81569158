"""CSR mini-batches on only the columns that occur in them, for clients that see few of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl.core.batching import Batches

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
        places = np.empty(starts[-1], self.places.dtype)
        values = np.empty(starts[-1], self.values.dtype)
        _kernels().csr_row_index(
            len(picked), picked, self.starts, self.places, self.values, places, values
        )
        return Entries(starts, places, values, self.width)

    def view(self, chosen: Array) -> View:
        """Return some rows, by their numbers (which may repeat), without a copy.

        They are read from the last to the first: what lies between the end of one row and the
        start of the next then counts as a row without entries.
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
        given, rows = coefficients.numpy(), len(self.limits) - 1
        arrays = (self.limits, self.entries.places, self.entries.values)
        found = np.zeros((rows, *given.shape[:-1]), given.dtype)
        if given.ndim == 1:
            vector = np.ascontiguousarray(given)
            _kernels().csr_matvec(rows, self.entries.width, *arrays, vector, found)
        else:
            sizes = (rows, self.entries.width, len(given))
            _kernels().csr_matvecs(*sizes, *arrays, given.T.ravel(), found.ravel())
        result = np.empty_like(found[::2])
        result[self.order] = found[::2]
        return torch.from_numpy(result)

    def adjoint(self, residuals: Tensor) -> Tensor:
        """Return X' r for r [n], or R' X for R [n, classes]."""
        given, rows = residuals.numpy(), len(self.limits) - 1
        # the arrays of a CSR matrix are those of its transpose in CSC
        arrays = (self.limits, self.entries.places, self.entries.values)
        spread = np.zeros((rows, *given.shape[1:]), given.dtype)
        spread[::2] = given[self.order]
        found = np.zeros((self.entries.width, *given.shape[1:]), given.dtype)
        if given.ndim == 1:
            _kernels().csc_matvec(self.entries.width, rows, *arrays, spread, found)
        else:
            sizes = (self.entries.width, rows, given.shape[1])
            _kernels().csc_matvecs(*sizes, *arrays, spread.ravel(), found.ravel())
        return torch.from_numpy(found.T)


@dataclass(frozen=True)
class Compacted:
    """Mini-batches of a CSR design without the columns that they never touch.

    Attributes
    ----------
    entries
        The distinct rows of all steps.
    columns
        The numbers of the columns that are left, ascending.
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
    """Gather CSR batches without the columns that they never touch, but for those in `also`.

    `also` marks the columns that stay in any case.
    """
    index = batches.index.numpy()
    drawn, order = np.unique(index, return_inverse=True)
    matrix = batches.x.matrix
    width, number = matrix.shape[1], np.result_type(matrix.indptr, matrix.indices)
    starts, places = (a.astype(number, copy=False) for a in (matrix.indptr, matrix.indices))
    part = Entries(starts, places, matrix.data, width).rows(drawn)
    occurs = also.copy()
    every = np.ones(max(len(part.places), len(drawn)), np.bool_)  # a Boolean product marks columns
    _kernels().csc_matvec(width, len(drawn), part.starts, part.places, every, every, occurs)
    kept = np.flatnonzero(occurs)
    place = np.empty(width, part.places.dtype)
    place[kept] = np.arange(len(kept), dtype=place.dtype)
    small = Entries(part.starts, place.take(part.places), part.values, len(kept))
    return Compacted(small, torch.from_numpy(kept), order.reshape(index.shape))


def _kernels() -> Any:
    """Return the kernels of SciPy's operators, whose checks take five times the arithmetic.

    Imported on first use: most clients have dense rows.
    """
    from scipy.sparse import _sparsetools

    return _sparsetools
