"""Checks and stacks the arrays that a user brings, one pair per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.ragged import Array, Indices

_ONE_INPUT = (
    ": a model reads one input; join several along the columns, np.hstack([X1, X2]), and split "
    "them in the module's forward"
)


@final
@dataclass(frozen=True, eq=False)
class Pooled:
    """All rows of all clients, in the order of the clients."""

    x: Any
    y: Array
    sizes: Indices
    classes: int | None


def pool(
    clients: Sequence[tuple[Any, Any]], file: tuple[Path, np.dtype[Any] | None] | None = None
) -> Pooled:
    """Stack one `(X, y)` per client, and name the client whose data do not fit.

    With a `file` (and the dtype to store, None: that of the data) the stack stays on disk.
    """
    if len(clients) == 0:
        raise DataError("there are no clients; give a list with one (X, y) for each")
    pairs = [_pair(number, client) for number, client in enumerate(clients)]
    for number, (x, y) in enumerate(pairs):
        _check_like_first(number, x, y, pairs[0])
    sizes = np.array([len(y) for _, y in pairs], dtype=np.int64)
    if file is not None:
        x = _on_disk([x for x, _ in pairs], *file)
    elif isinstance(pairs[0][0], np.ndarray):
        x = np.concatenate([x for x, _ in pairs])
        _check_finite("X", x, sizes)
    else:
        from scipy.sparse import vstack

        x = vstack([x for x, _ in pairs], format="csr")
        entries = np.diff(x.indptr[np.concatenate([[0], np.cumsum(sizes)])])
        _check_finite("X", x.data, entries)
    y = np.concatenate([y for _, y in pairs])
    _check_finite("y", y, sizes)
    if y.dtype.kind == "i" and y.ndim == 1 and y.min() == -1 and np.isin(y, (-1, 1)).all():
        y = (y + 1) // 2  # the labels -1 and +1 of a classifier
    return Pooled(x, y, sizes, _classes(y, sizes))


def _on_disk(parts: Sequence[Any], path: Path, dtype: np.dtype[Any] | None) -> Array:
    """Write the rows of one client after the other; return a map of the file."""
    first = parts[0]
    if not isinstance(first, np.ndarray):
        raise DataError("sparse data are pooled in memory; leave out the folder")
    rows = sum(len(part) for part in parts)
    kept = dtype or np.dtype(np.float64 if first.dtype == np.float64 else np.float32)
    whole = np.lib.format.open_memmap(path, "w+", kept, (rows, *first.shape[1:]))
    at = 0
    for number, part in enumerate(parts):
        _check_finite("X", part, np.array([len(part)]), number)
        whole[at : at + len(part)] = part
        at += len(part)
    whole.flush()
    mapped: Array = np.load(path, mmap_mode="r")
    return mapped


def _pair(number: int, client: Any) -> tuple[Any, Array]:
    if not isinstance(client, (tuple, list)) or len(client) != 2:
        several = isinstance(client, (tuple, list)) and len(client) > 2
        given = f"{len(client)} items" if several else type(client).__name__
        raise DataError(
            f"client {number}: expected a pair (X, y), got {given}{_ONE_INPUT if several else ''}"
        )
    x, y = _array(number, "X", client[0]), _array(number, "y", client[1])
    if not isinstance(y, np.ndarray) or y.ndim == 0:
        raise DataError(f"client {number}: y must be a dense array with one entry per row")
    for label, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "biuf":
            raise DataError(f"client {number}: {label} must hold numbers, not {array.dtype}")
    if x.ndim < 2:
        raise DataError(f"client {number}: X must have rows and columns, got shape {x.shape}")
    if x.shape[0] != len(y):
        several = isinstance(client[0], (tuple, list)) and x.ndim > 2 and x.shape[1] == len(y)
        raise DataError(
            f"client {number}: X has {x.shape[0]} rows but y has {len(y)}"
            + (_ONE_INPUT if several else "")
        )
    if len(y) == 0:
        raise DataError(f"client {number} has no rows; leave it out of the list")
    return x, y.astype(np.int64) if y.dtype.kind == "b" else y


def _array(number: int, label: str, value: Any) -> Any:
    """Return a NumPy array, or a CSR matrix where the value is sparse already."""
    if hasattr(value, "tocsr"):
        return value.tocsr()
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        hint = _ONE_INPUT if label == "X" else ""
        raise DataError(f"client {number}: {label} must be one array, got a mapping{hint}")
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        sizes = [np.shape(part) for part in value if hasattr(part, "shape")][:3]
        shapes = f" of shapes {', '.join(map(str, sizes))}" if sizes else " of unequal lengths"
        hint = _ONE_INPUT if sizes and label == "X" else "; pad or drop what does not fit"
        raise DataError(
            f"client {number}: {label} must be one array, got {len(value)} parts{shapes}{hint}"
        ) from error


def _check_like_first(number: int, x: Any, y: Array, first: tuple[Any, Array]) -> None:
    if isinstance(x, np.ndarray) != isinstance(first[0], np.ndarray):
        raise DataError(f"client {number}: X must be sparse for all clients or for none")
    for label, array, other in (("X", x, first[0]), ("y", y, first[1])):
        if array.shape[1:] != other.shape[1:]:
            raise DataError(
                f"client {number}: rows of {label} have shape {array.shape[1:]}, "
                f"those of client 0 {other.shape[1:]}; all clients need the same columns"
            )
        if _kind(array) != _kind(other):
            raise DataError(
                f"client {number}: {label} is {array.dtype} but client 0 has {other.dtype}; "
                "use integers for all clients or floats for all"
            )


def _kind(array: Any) -> str:
    return "f" if array.dtype.kind == "f" else "i"


def _check_finite(label: str, values: Array, sizes: Indices, first: int = 0) -> None:
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # one pass that writes nothing; a large sum may overflow
            return
    wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    if len(wrong):
        client = first + int(np.searchsorted(np.cumsum(sizes), wrong[0], side="right"))
        raise DataError(f"client {client}: {label} holds NaN or infinite values; fill or drop them")


def _classes(y: Array, sizes: Indices) -> int | None:
    if y.dtype.kind == "f":
        return None
    if y.ndim != 1:
        raise DataError(
            f"integer targets are class labels, one per row, got shape {list(y.shape[1:])} per "
            "row; turn one-hot targets into labels (y.argmax(1)), and give others as floats"
        )
    if y.min() < 0:
        row = int(np.argmin(y))
        client = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
        raise DataError(
            f"client {client}: integer targets are class labels from 0, or -1 and +1, "
            f"got {y.min()}; recode them, or give a numeric target as floats"
        )
    return int(y.max()) + 1
