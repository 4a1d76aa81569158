"""Scale features with statistics of the clients' training rows.

======== ==========================================================================
none     values unchanged
unit     divided by the largest absolute value (255 for images: the range 0 to 1)
pixel    each feature (x - mean) / (std + 0.001), as pFedMe's generator does
feature  each feature (x - mean) / std
channel  each image channel (x - mean) / std
======== ==========================================================================

A feature that is constant in the training rows becomes 0 in all rows: a model cannot learn from it,
and dividing a test row by 0.001 would give a huge value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from parsifl.core.errors import ConfigError, DataError, unknown
from parsifl.data.ragged import Array, Indices

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from parsifl.data.dataset import Features

_NAMES = ("channel", "feature", "none", "pixel", "unit")
_CHUNK = 4096


def normalizations() -> list[str]:
    """Return the names that `normalize` accepts."""
    return list(_NAMES)


def normalize(name: str, x: Features, rows: Indices) -> Features:
    """Return x scaled by statistics of `rows` (sparse matrices are only divided).

    >>> normalize("unit", np.array([[0, 51], [255, 0]], dtype=np.uint8), np.array([0, 1])).tolist()
    [[0.0, 0.20000000298023224], [1.0, 0.0]]
    """
    if name not in _NAMES:
        raise ConfigError(unknown("normalization", name, _NAMES))
    if name == "none":
        return x
    if name == "unit":
        largest = max(
            (float(np.abs(part).max(initial=0)) for part in _chunks(x, rows)), default=0.0
        )
        return _shifted(x, np.zeros(()), np.asarray(largest or 1.0))
    if not isinstance(x, np.ndarray):
        raise DataError(f"normalize='{name}' would fill a sparse matrix; use 'unit' or 'none'")
    if name == "channel" and x.ndim != 4:
        raise DataError(f"normalize='channel' needs images, but a sample has shape {x.shape[1:]}")
    mean, deviation = _moments(x, rows, axes=(0, 2, 3) if name == "channel" else (0,))
    scale = deviation + 0.001 if name == "pixel" else deviation
    return _shifted(x, mean, np.where(deviation > 0, scale, np.inf))


def _moments(x: Array, rows: Indices, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return mean and standard deviation, computed in chunks."""
    count = len(rows) * int(np.prod([x.shape[axis] for axis in axes if axis]))

    def mean_of(power: Callable[[Array], Array]) -> Array:
        kind = np.int64 if x.dtype == np.uint8 else np.float64
        total: Any = sum(
            power(part).sum(axis=axes, keepdims=True, dtype=kind) for part in _chunks(x, rows)
        )
        average: Array = np.asarray(total)[0] / count
        return average

    mean = mean_of(lambda part: part)
    if x.dtype == np.uint8:
        # sums of integers are exact, so the simple formula loses no precision
        squares = mean_of(lambda part: np.square(part, dtype=np.uint16))
        return mean, np.sqrt(np.maximum(squares - mean**2, 0))
    return mean, np.sqrt(mean_of(lambda part: np.square(part - mean)))


def _chunks(x: Features, rows: Indices) -> Iterator[Array]:
    for start in range(0, len(rows), _CHUNK):
        part = x[rows[start : start + _CHUNK]]
        yield part if isinstance(part, np.ndarray) else part.data


def _shifted(x: Features, mean: Array, scale: Array) -> Features:
    number = np.float64 if x.dtype == np.float64 else np.float32
    if not isinstance(x, np.ndarray):
        scaled: csr_matrix = x.astype(number)
        scaled.data = scaled.data / number(scale)
        return scaled
    out = np.empty(x.shape, dtype=number)
    centre, width = mean.astype(number), scale.astype(number)
    for start in range(0, len(x), _CHUNK):
        part = out[start : start + _CHUNK]
        np.subtract(x[start : start + _CHUNK], centre, out=part)
        part /= width
    return out
