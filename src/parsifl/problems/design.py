"""Design matrices, dense or CSR, behind the same few operations: the only place that branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parsifl.tree import Opaque


class CsrDesign(Opaque):
    """A SciPy CSR matrix as a leaf: rows are selected, products taken, never made dense."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, rows: Tensor) -> CsrDesign:
        return CsrDesign(self.matrix[rows.numpy()])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.matrix.shape
        return int(rows), int(columns)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""
        return torch.from_numpy(self.matrix.data[:0]).dtype


Design = Tensor | CsrDesign


def as_design(x: Any) -> Design:
    """Return a tensor as it is and wrap a CSR matrix."""
    return x if isinstance(x, Tensor) else CsrDesign(x)
