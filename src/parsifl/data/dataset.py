"""A dataset as plain arrays, before it is divided among clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.ragged import Array, Indices

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    Features: TypeAlias = Array | csr_matrix


@final
@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows, targets, and natural groups.

    Parameters
    ----------
    name
        The registered name.
    x
        One row per sample: an array (images are samples x channels x height x width, uint8) or a
        CSR matrix. Always finite.
    y
        Labels 0 .. classes - 1 (int64), or numbers (float64): samples, or samples x targets.
    classes
        The number of classes; None if the target is a number.
    groups
        The natural client of each row (writer, hospital, state ...) as a number 0, 1, ...
    group_names
        The names of these groups.
    test_x, test_y, test_groups
        The official test split, if there is one.
    feature_names
        Names of the columns, if there are any.
    truth
        The coefficients that generated the target, if known: features, or groups x features.
    """

    name: str
    x: Features
    y: Array
    classes: int | None = None
    groups: Indices | None = None
    group_names: tuple[str, ...] = ()
    test_x: Features | None = None
    test_y: Array | None = None
    test_groups: Indices | None = None
    feature_names: tuple[str, ...] = ()
    truth: Array | None = None

    def __post_init__(self) -> None:
        self._check_part("", self.x, self.y, self.groups)
        if (self.test_x is None) != (self.test_y is None):
            raise DataError(f"'{self.name}': a test split needs both test_x and test_y")
        if self.test_x is not None and self.test_y is not None:
            self._check_part("test_", self.test_x, self.test_y, self.test_groups)
            if self.test_x.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"'{self.name}': test rows have shape {self.test_x.shape[1:]}, "
                    f"training rows {self.x.shape[1:]}"
                )

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(int(side) for side in self.x.shape[1:])

    def merged(self) -> Dataset:
        """Return all rows, with the official test rows after the others."""
        if self.test_x is None or self.test_y is None:
            return self
        groups = None
        if self.groups is not None and self.test_groups is not None:
            groups = np.concatenate([self.groups, self.test_groups])
        return replace(
            self,
            x=_stack(self.x, self.test_x),
            y=np.concatenate([self.y, self.test_y]),
            groups=groups,
            test_x=None,
            test_y=None,
            test_groups=None,
        )

    def _check_part(self, prefix: str, x: Features, y: Array, groups: Indices | None) -> None:
        rows = int(x.shape[0])
        for field, array in (("y", y), ("groups", groups)):
            if array is not None and len(array) != rows:
                raise DataError(
                    f"'{self.name}': {prefix}x has {rows} rows but {prefix}{field} has {len(array)}"
                )
        for field, array in (("x", x if isinstance(x, np.ndarray) else x.data), ("y", y)):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise DataError(
                    f"'{self.name}': {prefix}{field} contains NaN or infinite values; "
                    "replace them or drop these rows before loading"
                )
        if self.classes is not None:
            check_labels(f"'{self.name}'", y, self.classes)
        if groups is not None and rows and self.group_names:
            check_labels(f"groups of '{self.name}'", groups, len(self.group_names))


def check_labels(what: str, labels: Array, classes: int) -> None:
    """Raise DataError unless labels are integers from 0 to classes - 1."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{what}: labels must be a flat array of integers, not {labels.dtype}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise DataError(
            f"{what}: labels must be 0 to {classes - 1}; got {labels.min()} to {labels.max()}"
        )


def _stack(first: Features, second: Features) -> Features:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    from scipy.sparse import csr_matrix, vstack

    stacked: csr_matrix = vstack([csr_matrix(first), csr_matrix(second)], format="csr")
    return stacked
