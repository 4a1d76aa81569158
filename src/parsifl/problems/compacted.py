"""CSR mini-batches on only the columns that occur in them, for clients that see few of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# the kernels of SciPy's own operators: on so few rows their checks take five times the arithmetic
from scipy.sparse import _sparsetools as kernels
from torch import Tensor

from parsifl.work import Batches

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Entries:
    """A few rows as CSR arrays, and their number of columns."""

    starts: Array
    places: Array
    values: Array
    width: int

    def rows(self, chosen: Array) -> Entries:
        """Return some rows, by their numbers (which may repeat)."""
        picked = chosen.astype(self.starts.dtype, copy=False)
        starts = np.zeros(len(picked) + 1, self.starts.dtype)
        np.cumsum(self.starts[picked + 1] - self.starts[picked], out=starts[1:])
        places = np.empty(starts[-1], self.places.dtype)
        values = np.empty(starts[-1], self.values.dtype)
        kernels.csr_row_index(
            len(picked), picked, self.starts, self.places, self.values, places, values
        )
        return Entries(starts, places, values, self.width)

    def product(self, coefficients: Tensor) -> Tensor:
        """Return X v for v [d], or X W' for W [classes, d]."""
        rows, given = len(self.starts) - 1, coefficients.numpy()
        arrays = (self.starts, self.places, self.values)
        if given.ndim == 1:
            found = np.zeros(rows, given.dtype)
            kernels.csr_matvec(rows, self.width, *arrays, np.ascontiguousarray(given), found)
            return torch.from_numpy(found)
        found = np.zeros((rows, len(given)), given.dtype)
        kernels.csr_matvecs(rows, self.width, len(given), *arrays, given.T.ravel(), found.ravel())
        return torch.from_numpy(found)

    def adjoint(self, residuals: Tensor) -> Tensor:
        """Return X' r for r [n], or R' X for R [n, classes]."""
        rows, given = len(self.starts) - 1, residuals.numpy()
        # the arrays of a CSR matrix are those of its transpose in CSC
        arrays = (self.starts, self.places, self.values)
        if given.ndim == 1:
            found = np.zeros(self.width, given.dtype)
            kernels.csc_matvec(self.width, rows, *arrays, np.ascontiguousarray(given), found)
            return torch.from_numpy(found)
        classes = given.shape[1]
        found = np.zeros((self.width, classes), given.dtype)
        kernels.csc_matvecs(self.width, rows, classes, *arrays, given.ravel(), found.ravel())
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

    def step(self, number: int) -> Entries:
        """Return the rows of one step."""
        return self.entries.rows(self.order[number])


def compacted(batches: Batches, also: Array) -> Compacted:
    """Gather CSR batches without the columns that they never touch, but for those in `also`."""
    index = batches.index.numpy()
    drawn, order = np.unique(index, return_inverse=True)
    matrix = batches.x.matrix
    width, number = matrix.shape[1], np.result_type(matrix.indptr, matrix.indices)
    starts, places = (a.astype(number, copy=False) for a in (matrix.indptr, matrix.indices))
    part = Entries(starts, places, matrix.data, width).rows(drawn)
    occurs = np.zeros(width, np.bool_)
    every = np.ones(max(len(part.places), len(drawn)), np.bool_)  # a Boolean product marks columns
    kernels.csc_matvec(width, len(drawn), part.starts, part.places, every, every, occurs)
    occurs[also] = True
    kept = np.flatnonzero(occurs)
    place = np.empty(width, part.places.dtype)
    place[kept] = np.arange(len(kept), dtype=place.dtype)
    small = Entries(part.starts, place.take(part.places), part.values, len(kept))
    return Compacted(small, torch.from_numpy(kept), order.reshape(index.shape))
