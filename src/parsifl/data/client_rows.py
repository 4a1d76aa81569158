"""What a user may pass for one client, and how the rows of all clients are stacked.

A client is a pair `(X, y)`; with its own split, `(X, y, X_test, y_test)` or a dictionary of pairs
under "train", "validation" and "test". A map-style dataset (PyTorch's `Dataset`, `Subset`,
torchvision's folders) stands for a pair. Labels may be words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.ragged import Array, Indices

Pair = tuple[Any, Array]
SPLITS = ("train", "validation", "test")
_ONE_INPUT = (
    ": a model takes one input; join several along the columns, np.hstack([X1, X2]), and split "
    "them in the module's forward"
)


@final
@dataclass(frozen=True, eq=False)
class StackedRows:
    """All rows of all clients, in the order of the clients.

    Attributes
    ----------
    sizes
        The number of rows of each client.
    classes
        The number of classes; None if the target is a number.
    labels
        The words that the class labels stand for, in order; empty if labels are numbers.
    splits
        Rows of each client in train, validation and test [clients, 3], in this order among its
        rows; None if clients have no split of their own.
    """

    x: Any
    y: Array
    sizes: Indices
    classes: int | None
    labels: tuple[str, ...] = ()
    splits: Indices | None = None


def stack_rows(
    clients: Sequence[Any],
    file: tuple[Path, np.dtype[Any] | None] | None = None,
    labels: Sequence[str] = (),
) -> StackedRows:
    """Stack the rows of all clients; errors name the client.

    With a `file` (and the dtype to store, None: that of the data) the stack stays on disk. Words
    among `y` become numbers in the order of `labels`. Default: in alphabetical order.
    """
    if len(clients) == 0:
        raise DataError("there are no clients; pass a list with one (X, y) per client")
    _check_nesting(clients)
    forms = [_splits(number, client) for number, client in enumerate(clients)]
    known, pairs, splits = _stack_splits(forms, labels)
    for number, (x, y) in enumerate(pairs):
        _check_like_first(number, x, y, pairs[0])
    sizes = np.array([len(y) for _, y in pairs], dtype=np.int64)
    if file is not None:
        x = _on_disk([x for x, _ in pairs], *file)
    else:
        x = _concatenated([x for x, _ in pairs])
        if isinstance(x, np.ndarray):
            _check_finite("X", x, sizes)
        else:
            entries = np.diff(x.indptr[np.concatenate([[0], np.cumsum(sizes)])])
            _check_finite("X", x.data, entries)
    y = np.concatenate([y for _, y in pairs])
    _check_finite("y", y, sizes)
    if y.dtype.kind == "i" and y.ndim == 1 and y.min() == -1 and np.isin(y, (-1, 1)).all():
        y = (y + 1) // 2  # the labels -1 and +1 of a classifier
    counted = _classes(y, sizes)
    classes = len(known) if known else counted
    explicit = splits if any(len(form) > 1 for form in forms) else None
    return StackedRows(x, y, sizes, classes, known, explicit)


def has_integer_features(client: Any) -> bool:
    """Return whether the features of a client are integers, such as tokens."""
    x, _ = _splits(0, client)["train"]
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def _splits(number: int, client: Any) -> dict[str, Pair]:
    """Return the pairs of arrays of a client by split."""
    if isinstance(client, Mapping):
        unknown = [name for name in client if name not in SPLITS]
        if unknown or "train" not in client:
            raise DataError(
                f"client {number}: a dictionary has the keys {', '.join(map(repr, SPLITS))}, of "
                f"which 'train' is required; got {', '.join(map(repr, client)) or 'none'}"
            )
        return {name: _pair(number, client[name]) for name in SPLITS if name in client}
    if isinstance(client, (tuple, list)) and len(client) == 4:
        return {"train": _pair(number, client[:2]), "test": _pair(number, client[2:])}
    return {"train": _pair(number, client)}


def _stack_splits(
    forms: Sequence[Mapping[str, Pair]], labels: Sequence[str]
) -> tuple[tuple[str, ...], list[Pair], Indices]:
    """Return the words of labels, one pair per client, and the rows of each split."""
    words = [_is_words(y) for form in forms for _, y in form.values()]
    if any(words) and not all(words):
        number = next(n for n, form in enumerate(forms) if not _is_words(form["train"][1]))
        raise DataError(f"client {number}: y has numbers, and that of other clients has words")
    known = tuple(labels)
    if len(set(known)) < len(known):
        raise DataError(f"labels={list(known)!r:.80} has a label twice")
    if known and not any(words):
        raise DataError(
            f"labels={list(known)!r:.80} orders labels that are words, but y has numbers: remove "
            "labels, or pass words"
        )
    if any(words) and not known:
        known = tuple(sorted({str(w) for form in forms for _, y in form.values() for w in y.flat}))
    pairs: list[Pair] = []
    for number, form in enumerate(forms):
        parts = list(form.values())
        for x, y in parts[1:]:
            _check_like_first(number, x, y, parts[0], f"the training rows of client {number}")
        y = np.concatenate([y for _, y in parts])
        pairs.append((_concatenated([x for x, _ in parts]), _codes(number, y, known)))
    rows = [[len(form[name][1]) if name in form else 0 for name in SPLITS] for form in forms]
    return known if any(words) else (), pairs, np.array(rows, dtype=np.int64)


def _is_words(y: Array) -> bool:
    return y.dtype.kind in "US"


def _codes(number: int, y: Array, labels: Sequence[str]) -> Array:
    """Return the positions of words among the labels; numbers are unchanged."""
    if not _is_words(y):
        return y
    code = {label: position for position, label in enumerate(labels)}
    if missing := sorted({str(word) for word in y.flat} - code.keys()):
        raise DataError(
            f"client {number}: y has the label {missing[0]!r}, which is not among labels="
            f"{list(labels)!r:.80}"
        )
    codes = [code[str(word)] for word in y.flat]
    return np.array(codes, dtype=np.int64).reshape(y.shape)


def _concatenated(arrays: Sequence[Any]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    from scipy.sparse import vstack

    return vstack(arrays, format="csr")


def _on_disk(parts: Sequence[Any], path: Path, dtype: np.dtype[Any] | None) -> Array:
    """Write the rows of the clients in order; return a memory map of the file."""
    first = parts[0]
    if not isinstance(first, np.ndarray):
        raise DataError("sparse data are pooled in memory; remove the folder")
    rows = sum(len(part) for part in parts)
    stored_dtype = dtype or np.dtype(np.float64 if first.dtype == np.float64 else np.float32)
    stored = np.lib.format.open_memmap(path, "w+", stored_dtype, (rows, *first.shape[1:]))
    at = 0
    for number, part in enumerate(parts):
        _check_finite("X", part, np.array([len(part)]), number)
        stored[at : at + len(part)] = part
        at += len(part)
    stored.flush()
    mapped: Array = np.load(path, mmap_mode="r")
    return mapped


def _check_nesting(clients: Sequence[Any]) -> None:
    """Reject the arrays of all clients in place of one pair for each client."""
    if len(clients) != 2:
        return
    first, second = clients
    arrays = all(len(getattr(part, "shape", ())) > 0 for part in clients)
    if arrays and first.shape[0] == second.shape[0]:
        raise DataError(
            "expected a list with one pair (X, y) per client, got one pair of arrays: write "
            "[(X, y)] for a single client, or divide the rows, such as "
            "[(X[i::10], y[i::10]) for i in range(10)] for ten clients"
        )
    if not all(isinstance(part, list | tuple) and part for part in clients):
        return
    if not all(hasattr(array, "shape") for part in clients for array in part):
        return
    # of two clients, the first would be features with its own targets: matrix and vector
    features, targets = ([tuple(array.shape) for array in part] for part in clients)
    same_rows = [shape[:1] for shape in features] == [shape[:1] for shape in targets]
    if same_rows and all(
        len(x) > 1 and len(y) == 1 for x, y in zip(features, targets, strict=True)
    ):
        raise DataError(
            "expected a list with one pair (X, y) per client, got a list of X and a list of y: "
            "write list(zip(X, y))"
        )


def _pair(number: int, client: Any) -> Pair:
    if _is_dataset(client):
        client = _collated(number, client)
    if not isinstance(client, (tuple, list)) or len(client) != 2:
        raise DataError(f"client {number}: expected a pair (X, y), got {_instead_of_pair(client)}")
    x, y = _array(number, "X", client[0]), _array(number, "y", client[1])
    if not isinstance(y, np.ndarray) or y.ndim == 0:
        raise DataError(f"client {number}: y must be a dense array with one entry per row")
    if y.dtype.kind == "O" and all(isinstance(value, str) for value in y.flat):
        y = y.astype(str)
    if y.dtype.kind == "O":
        _check_labels(number, y)
    for label, array, kinds in (("X", x, "biuf"), ("y", y, "biufU")):
        if array.dtype.kind not in kinds:
            raise DataError(f"client {number}: {label} must contain numbers, not {array.dtype}")
    if x.ndim < 2:
        raise DataError(f"client {number}: X must have rows and columns, got shape {x.shape}")
    if x.shape[0] != len(y):
        several = isinstance(client[0], (tuple, list)) and x.ndim > 2 and x.shape[1] == len(y)
        raise DataError(
            f"client {number}: X has {x.shape[0]} rows but y has {len(y)}"
            + (_ONE_INPUT if several else "")
        )
    if len(y) == 0:
        raise DataError(f"client {number} has no rows; remove it from the list")
    return x, y.astype(np.int64) if y.dtype.kind == "b" else y


def _check_labels(number: int, y: Array) -> None:
    """Reject words among which a label is missing or has another type."""
    words = [isinstance(value, str) for value in y.flat]
    if any(words):
        row = words.index(False)
        raise DataError(
            f"client {number}: y has words, but {y.flat[row]!r:.80} in row {row}: remove rows "
            "without a label, or write all labels as words"
        )


def _instead_of_pair(client: Any) -> str:
    """Describe what was given for a client, with the way to a pair."""
    kind = type(client).__name__
    if hasattr(client, "dataset") and hasattr(client, "batch_size"):
        return f"{kind}: pass its `dataset`, not batches"
    if not isinstance(client, (tuple, list)) or len(client) < 3:
        return kind
    return f"{len(client)} items{_ONE_INPUT}"


def _is_dataset(client: Any) -> bool:
    """Return whether an object is a map-style dataset, such as `torch.utils.data.Subset`."""
    return (
        hasattr(client, "__getitem__")
        and hasattr(client, "__len__")
        and not isinstance(client, (tuple, list, str, Mapping))
        and not hasattr(client, "shape")
    )


def _collated(number: int, dataset: Any) -> Pair:
    """Read all items of a map-style dataset."""
    features: list[Any] = []
    targets: list[Any] = []
    for position in range(len(dataset)):
        item = dataset[position]
        where = f"client {number}: item {position} of its {type(dataset).__name__}"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            values = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
            raise DataError(f"{where} must be a pair (x, y), got a {type(item).__name__}{values}")
        x = _array(number, "X", item[0])
        if x.dtype.kind not in "biuf":
            raise DataError(
                f"{where} holds {type(item[0]).__name__} instead of numbers: give the dataset a "
                "transform to tensors"
            )
        if features and x.shape != features[0].shape:
            raise DataError(
                f"{where} has shape {list(x.shape)}, but item 0 has {list(features[0].shape)}: "
                "resize, crop or pad them in the dataset's transform"
            )
        features.append(x)
        targets.append(_array(number, "y", item[1]))
    if not features:
        raise DataError(f"client {number} has no rows; remove it from the list")
    try:
        return np.stack(features), np.stack(targets)
    except ValueError as error:
        raise DataError(f"client {number}: targets of its items have unequal shapes") from error


def _array(number: int, label: str, value: Any) -> Any:
    """Return a NumPy array, or a CSR matrix if the value is sparse."""
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
        sizes = [np.shape(part) for part in value if hasattr(part, "shape")]
        shapes = f" of shapes {', '.join(map(str, sizes[:3]))}" if sizes else " of unequal lengths"
        inputs = bool(sizes) and all(len(size) > 1 and size[0] == sizes[0][0] for size in sizes)
        hint = _ONE_INPUT if inputs and label == "X" else "; pad or drop rows of other lengths"
        raise DataError(
            f"client {number}: {label} must be one array, got {len(value)} parts{shapes}{hint}"
        ) from error


def _check_like_first(
    number: int, x: Any, y: Array, first: Pair, reference: str = "client 0"
) -> None:
    if isinstance(x, np.ndarray) != isinstance(first[0], np.ndarray):
        raise DataError(f"client {number}: X must be sparse for all clients or for none")
    for label, array, other in (("X", x, first[0]), ("y", y, first[1])):
        if array.shape[1:] != other.shape[1:]:
            raise DataError(
                f"client {number}: rows of {label} have shape {array.shape[1:]}, "
                f"those of {reference} {other.shape[1:]}; all clients need the same columns"
            )
        if _kind(array) != _kind(other):
            raise DataError(
                f"client {number}: {label} is {array.dtype} but {reference} has {other.dtype}; "
                "use integers for all clients or floats for all"
            )


def _kind(array: Any) -> str:
    return "f" if array.dtype.kind == "f" else "i"


def _check_finite(label: str, values: Array, sizes: Indices, first: int = 0) -> None:
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # one pass without writes; a large sum may overflow
            return
    wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
    if len(wrong):
        client = first + int(np.searchsorted(np.cumsum(sizes), wrong[0], side="right"))
        raise DataError(f"client {client}: {label} has NaN or infinite values; fill or drop them")


def _classes(y: Array, sizes: Indices) -> int | None:
    if y.dtype.kind == "f":
        return None
    if y.ndim != 1 and y.shape[1:] == (1,):
        raise DataError(
            f"integer targets are class labels, one per row, got shape {list(y.shape)}: flatten "
            "them, y.ravel(), or select the column of a data frame"
        )
    if y.ndim != 1:
        raise DataError(
            f"integer targets are class labels, one per row, got shape {list(y.shape[1:])} per "
            "row; convert one-hot targets to labels (y.argmax(1)), and other targets to floats"
        )
    if y.min() < 0:
        row = int(np.argmin(y))
        client = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
        raise DataError(
            f"client {client}: integer targets are class labels from 0, or -1 and +1, "
            f"got {y.min()}; recode them, or convert a numeric target to floats"
        )
    return int(y.max()) + 1
