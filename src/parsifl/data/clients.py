"""The input of every engine: one pooled array and, for each client, its row numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.ragged import Array, Indices, Ragged
from parsifl.data.splits import label_shares, split_clients

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from parsifl.data.dataset import Dataset

__all__ = ["ClientData", "Ragged"]

_ONE_INPUT = (
    ": a model takes one input; join several along the columns, np.hstack([X1, X2]), and split "
    "them in the module's forward"
)
MOST_CLASSES = 10**6


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
    """Stack one `(X, y)` per client; errors name the client.

    With a `file` (and the dtype to store, None: that of the data) the stack stays on disk.
    """
    if len(clients) == 0:
        raise DataError("there are no clients; pass a list with one (X, y) per client")
    _check_nesting(clients)
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
    """Write the rows of the clients in order; return a memory map of the file."""
    first = parts[0]
    if not isinstance(first, np.ndarray):
        raise DataError("sparse data are pooled in memory; remove the folder")
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


def _pair(number: int, client: Any) -> tuple[Any, Array]:
    if not isinstance(client, (tuple, list)) or len(client) != 2:
        raise DataError(f"client {number}: expected a pair (X, y), got {_instead_of_pair(client)}")
    x, y = _array(number, "X", client[0]), _array(number, "y", client[1])
    if not isinstance(y, np.ndarray) or y.ndim == 0:
        raise DataError(f"client {number}: y must be a dense array with one entry per row")
    for label, array in (("X", x), ("y", y)):
        if array.dtype.kind not in "biuf":
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


def _instead_of_pair(client: Any) -> str:
    """Describe what was given for a client, with the way to a pair."""
    kind = type(client).__name__
    if hasattr(client, "dataset") and hasattr(client, "batch_size"):
        return f"{kind}: pass the arrays of its `dataset`, not batches"
    if (
        hasattr(client, "__getitem__")
        and hasattr(client, "__len__")
        and not (isinstance(client, (tuple, list, str, Mapping)) or hasattr(client, "shape"))
    ):
        return (
            f"{kind}: collate a dataset into its arrays, "
            "torch.utils.data.default_collate([dataset[i] for i in range(len(dataset))])"
        )
    if not isinstance(client, (tuple, list)) or len(client) < 3:
        return kind
    rows = [len(part) if hasattr(part, "__len__") else None for part in client]
    if len(client) == 4 and rows[0] == rows[1] and rows[2] == rows[3] and rows[0] is not None:
        return (
            "4 items: for (X, y, X_test, y_test), stack the rows and give ClientData the row "
            "numbers of each split, ClientData(x, y, train, validation, test, ...), or pass "
            "(X, y) and a fraction as test="
        )
    return f"{len(client)} items{_ONE_INPUT}"


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
            "them, y.ravel()"
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


@final
@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of all clients: pooled rows, and which of them each client may read.

    Parameters
    ----------
    x
        All rows of all clients: a tensor, a NumPy array (with a memmap, rows are read from disk
        when they are drawn) or a CSR matrix.
    y
        One target per row: int64 labels, or floats (with a second axis for several targets).
    train, validation, test
        Row numbers of each client; a part may be empty. Use `Ragged` for many clients.
    profiles
        Device profile of each client (width, budget, epochs ...): JSON values.
    name
        The name of the dataset, for the record.
    classes
        The number of classes; None for regression and survival targets.
    augment
        The name of an augmentation that the engine draws by key, e.g. "flip-crop"; "" for none.
    source
        How the data were prepared: partition, held-out shares, normalization. Part of a run's
        configuration.
    truth
        The coefficients that generated a real target, if they are known and the same for all
        clients.
    """

    x: Tensor | csr_matrix
    y: Tensor
    train: Sequence[Indices]
    validation: Sequence[Indices]
    test: Sequence[Indices]
    profiles: Sequence[Mapping[str, Any]]
    name: str = ""
    classes: int | None = None
    augment: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    truth: Array | None = None

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            if isinstance(getattr(self, name), np.ndarray):
                object.__setattr__(self, name, as_tensor(getattr(self, name)))
            if not hasattr(getattr(self, name), "shape"):
                given = type(getattr(self, name)).__name__
                raise DataError(
                    f"{name} must be one tensor, array or CSR matrix with all rows, got a {given}"
                )
        if (self.classes or 0) > MOST_CLASSES:  # a model with that many outputs
            raise DataError(
                f"the labels imply {self.classes} classes, more than {MOST_CLASSES}; convert "
                "numeric targets to a floating-point type"
            )
        rows, count = int(self.x.shape[0]), len(self.train)
        if len(self.y) != rows:
            raise DataError(f"x has {rows} rows but y has {len(self.y)}; they must agree")
        for name in ("validation", "test", "profiles"):
            if len(getattr(self, name)) != count:
                raise DataError(
                    f"{name} has {len(getattr(self, name))} clients but train has {count}"
                )
        for kind in set(map(type, self.profiles)):
            if not issubclass(kind, Mapping):
                raise DataError(
                    f"a profile must be a mapping, as {{'width': 0.5}}, got {kind.__name__}"
                )
        if any(self.profiles):  # profiles are written as JSON, which does not support NumPy
            object.__setattr__(self, "profiles", tuple(map(_plain, self.profiles)))
        for name in ("train", "validation", "test"):
            _check_rows(name, getattr(self, name), rows)

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        """Return sizes instead of values.

        >>> import numpy as np
        >>> ClientData.of([(np.zeros((8, 2), np.float32), np.array([0, 1] * 4))] * 3)
        ClientData('own': 3 clients, 24 rows of shape [2] and float32, 2 classes;
                   training rows per client 6, validation 0, test 2)
        """
        dtype = str(self.x.dtype).removeprefix("torch.")
        kind = "" if hasattr(self.x, "numel") else "sparse "
        target = "real targets" if self.classes is None else f"{self.classes} classes"
        parts = ", ".join(
            f"{label} {_range(part)}"
            for label, part in (
                ("training rows per client", self.train),
                ("validation", self.validation),
                ("test", self.test),
            )
        )
        return (
            f"ClientData({self.name!r}: {len(self):,} clients, {int(self.x.shape[0]):,} {kind}rows "
            f"of shape {list(self.x.shape[1:])} and {dtype}, {target};\n           {parts})"
        )

    @classmethod
    def of(
        cls,
        clients: Sequence[tuple[Any, Any]],
        *,
        test: float = 0.25,
        validation: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        profiles: Sequence[Mapping[str, Any]] | None = None,
        folder: str | Path | None = None,
    ) -> ClientData:
        """Stack one `(X, y)` per client: arrays, tensors or SciPy sparse matrices.

        float64 and float32 are kept, integer features become float32 (unless `dtype` is given,
        such as torch.int64 for tokens; `parsifl.simulate` infers it from the model), and
        integer targets become int64 class labels. With a `folder` the features are pooled in a
        file there (x.npy) and stay on disk: for data larger than memory, given as one memmap
        per client.

        >>> import numpy as np
        >>> data = ClientData.of([(np.zeros((4, 2)), np.array([0, 1, 0, 1]))], test=0.25)
        >>> len(data), data.train.sizes.tolist(), data.test.sizes.tolist(), data.classes
        (1, [3], [1], 2)
        """
        from parsifl.data.clients import pool

        _check_split(test, validation, dtype)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        pooled = pool(clients, None if folder is None else (Path(folder) / "x.npy", _number(dtype)))
        parts = Ragged.from_sizes(np.arange(len(pooled.y)), pooled.sizes)
        key = Key(seed, purpose="data/split")
        train, held, tested = split_clients(parts, (1 - test - validation, validation, test), key)
        x = _features(pooled.x, dtype)
        return cls(
            x=x,
            y=_targets(pooled.y, pooled.classes, x),
            train=train,
            validation=held,
            test=tested,
            profiles=({},) * len(parts) if profiles is None else tuple(profiles),
            name="own",
            classes=pooled.classes,
        )

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset,
        parts: Sequence[Indices],
        *,
        test: float | Sequence[Indices] = 0.25,
        validation: float = 0.0,
        key: Key | None = None,
        normalize: str = "none",
        dtype: torch.dtype | None = None,
    ) -> ClientData:
        """Assign the rows `parts[i]` of a dataset to client i.

        Parameters
        ----------
        test
            The fraction of each client's rows that is held out; or row numbers into the official
            test split, one array per client (see `personal_tests`).
        validation
            The fraction of each client's rows that is held out for tuning.
        normalize
            One of `parsifl.data.normalizations()`; the statistics come only from the clients'
            training rows.
        dtype
            The dtype of x and of a regression target; None is float32.
        """
        import torch

        from parsifl.data.normalize import normalize as apply

        owned = Ragged.of(parts)
        _check_no_empty(owned.sizes)
        share = test if isinstance(test, (int, float)) else 0.0
        fractions = (1 - share - validation, validation, share)
        train, held, tested = split_clients(owned, fractions, key or Key(0, purpose="data/split"))
        if not isinstance(test, (int, float)):
            tested = Ragged.of(test)
            dataset, tested = dataset.merged(), Ragged(tested.values + len(dataset), tested.offsets)
        x = apply(normalize, dataset.x, np.unique(train.values))
        known = dataset.truth if normalize == "none" and dataset.classes is None else None
        features = _features(x, torch.float32 if dtype is None else dtype)
        return cls(
            x=features,
            y=_targets(dataset.y, dataset.classes, features),
            train=train,
            validation=held,
            test=tested,
            profiles=({},) * len(owned),
            name=dataset.name,
            classes=dataset.classes,
            truth=None if known is None or known.ndim > 1 else known,
        )

    def shares(self) -> Array:
        """Return the label distribution of each client's training rows, clients x classes."""
        if self.classes is None:
            raise DataError(f"'{self.name}' has no classes: its target is a number")
        return label_shares(self.y.numpy(), self.train, self.classes)

    def flattened(self) -> ClientData:
        """Return the same data with one vector of features per row (a view of tensors)."""
        import torch

        flat = self.x.flatten(1) if isinstance(self.x, torch.Tensor) else self.x
        return replace(self, x=flat)


def _range(parts: Sequence[Indices]) -> str:
    sizes = Ragged.of(parts).sizes
    if not len(sizes):
        return "0"
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _check_split(test: Any, validation: Any, dtype: Any) -> None:
    import torch

    for what, share in (("test", test), ("validation", validation)):
        if isinstance(share, bool) or not isinstance(share, Real):
            arrays = hasattr(share, "__len__") and not isinstance(share, str)
            given = f"a {type(share).__name__}" if arrays else f"{share!r:.80}"
            own = (
                "; for your own split, give ClientData the row numbers of each split, "
                "ClientData(x, y, train, validation, test, ...)"
            )
            raise ConfigError(
                f"{what} must be a fraction of each client's rows, got {given}"
                + (own if arrays else "")
            )
    if not isinstance(dtype, torch.dtype | None):
        raise ConfigError(f"dtype must be a torch dtype such as torch.float32, got {dtype!r:.80}")


def _number(dtype: torch.dtype | None) -> np.dtype[Any] | None:
    import torch

    return None if dtype is None else torch.empty(0, dtype=dtype).numpy().dtype


def _features(x: Any, dtype: torch.dtype | None) -> Tensor | csr_matrix:
    import torch

    if dtype is None:
        dtype = torch.float64 if x.dtype == np.float64 else torch.float32
    if not isinstance(x, np.ndarray):
        return x.astype(_number(dtype), copy=False)  # type: ignore[no-any-return]  # a CSR matrix
    return as_tensor(x).to(dtype)


def as_tensor(array: Array) -> Tensor:
    """Return a tensor over the same memory, also of read-only memory maps."""
    import torch

    with warnings.catch_warnings():
        # torch warns that a read-only array could be written to, but pooled data never are
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _targets(y: Array, classes: int | None, x: Tensor | csr_matrix) -> Tensor:
    import torch

    if classes is not None:
        return as_tensor(np.asarray(y, dtype=np.int64))
    kept = x.dtype if isinstance(x, torch.Tensor) else torch.from_numpy(x.data[:0]).dtype
    return as_tensor(np.asarray(y)).to(kept if kept.is_floating_point else torch.float32)


def _plain(profile: Mapping[str, Any]) -> dict[str, Any]:
    speed: Any = profile.get("flops_per_second", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, Real) or not 0 < float(speed) < math.inf:
        raise ConfigError(
            f"flops_per_second of a device must be a number above 0, got {speed!r:.80}"
        )
    numpy = np.generic | np.ndarray
    return {k: v.tolist() if isinstance(v, numpy) else v for k, v in profile.items()}


def _check_rows(field: str, parts: Sequence[Indices], rows: int) -> None:
    values = Ragged.of(parts).values
    if len(values) and not (values.min() >= 0 and values.max() < rows):
        raise DataError(
            f"{field} names rows {int(values.min())} to {int(values.max())}, "
            f"but x has rows 0 to {rows - 1}"
        )


def _check_no_empty(sizes: Indices) -> None:
    if len(sizes) == 0:
        raise DataError("there are no clients; pass at least one")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DataError(
            f"{len(empty)} of {len(sizes)} clients have no rows (the first is client {empty[0]}); "
            "use fewer clients, or a partition with a minimum size"
        )
