"""Index arrays of unequal length, stored in two flat arrays for any number of clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

from parsifl.core.errors import DataError

Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class Ragged(Sequence[Indices]):
    """A sequence of index arrays: part i is `values[offsets[i]:offsets[i + 1]]`.

    Both arrays may be memory-mapped; an item is a view.

    >>> parts = Ragged.of([[3, 1], [], [2]])
    >>> len(parts), parts[0].tolist(), parts.sizes.tolist()
    (3, [3, 1], [2, 0, 1])
    """

    values: Indices
    offsets: Indices

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise DataError("Ragged needs two flat arrays, and offsets that begin with 0")
        growing = bool(np.all(np.diff(self.offsets) >= 0))
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values) or not growing:
            raise DataError(
                f"Ragged offsets must rise from 0 to {len(self.values)}, the number of values; "
                f"got {int(self.offsets[0])} to {int(self.offsets[-1])}"
            )

    @classmethod
    def of(cls, parts: Iterable[npt.ArrayLike]) -> Ragged:
        """Copy a sequence of index arrays into a Ragged; a Ragged is returned unchanged."""
        if isinstance(parts, Ragged):
            return parts
        arrays = [np.asarray(part, dtype=np.int64).ravel() for part in parts]
        sizes = np.fromiter((len(array) for array in arrays), dtype=np.int64, count=len(arrays))
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        return cls.from_sizes(values, sizes)

    @classmethod
    def from_sizes(cls, values: Indices, sizes: Array) -> Ragged:
        """Cut `values` into consecutive parts of the given sizes."""
        return cls(values, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def empty(cls, count: int) -> Ragged:
        """Return `count` empty parts."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(count + 1, dtype=np.int64))

    @property
    def sizes(self) -> Indices:
        """How many values each part has."""
        return np.diff(self.offsets)

    def owners(self) -> Indices:
        """Return the number of the part that each value belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Indices: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Indices | Ragged:
        if isinstance(index, slice):
            return Ragged.of([self[i] for i in range(*index.indices(len(self)))])
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"part {index} of {len(self)}")
        return self.values[self.offsets[position] : self.offsets[position + 1]]
