"""The input of every engine: one pooled array and, for each client, its row numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.client_rows import stack_rows
from parsifl.data.ragged import Array, Indices, Ragged
from parsifl.data.splits import label_shares, split_clients

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from parsifl.data.dataset import Dataset

__all__ = ["ClientData", "Ragged"]

MOST_CLASSES = 10**6


class RowsByClient(Protocol):
    """Row numbers by client number."""

    def __getitem__(self, client: int, /) -> Indices:
        """Return the row numbers of a client."""


@final
@dataclass(frozen=True)
class _Numbered:
    """The parts of clients whose numbers start at `first`."""

    parts: Sequence[Indices]
    first: int

    def __getitem__(self, client: int, /) -> Indices:
        if client < self.first:
            raise IndexError(f"there is no client {client}; the first one is {self.first}")
        return self.parts[client - self.first]


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
    first
        The number of the first client. Default: 0. A client that is alone on a machine has its
        number here: random draws depend on it.
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
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            if isinstance(getattr(self, name), np.ndarray):
                object.__setattr__(self, name, as_tensor(getattr(self, name)))
            if not hasattr(getattr(self, name), "shape"):
                type_name = type(getattr(self, name)).__name__
                raise DataError(
                    f"{name} must be one tensor, array or CSR matrix with all rows, got a "
                    f"{type_name}"
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

    def rows_by_client(self, split: str) -> RowsByClient:
        """Return the row numbers of a split ("train", "validation", "test") by client number."""
        rows: Sequence[Indices] = getattr(self, split)
        return _Numbered(rows, self.first) if self.first else rows

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
        clients: Sequence[Any],
        *,
        test: float = 0.25,
        validation: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        profiles: Sequence[Mapping[str, Any]] | None = None,
        folder: str | Path | None = None,
        labels: Sequence[str] = (),
    ) -> ClientData:
        """Stack one `(X, y)` per client: arrays, tensors or SciPy sparse matrices.

        A client may also be a map-style dataset of pairs, and may bring its own split:
        `(X, y, X_test, y_test)`, or a dictionary of pairs with the keys "train", "validation" and
        "test". Then `test` is not used, and `validation` must be 0.

        Labels that are words become numbers in the order of `labels`. Default: in alphabetical
        order. `source["labels"]` has the words.

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
        check_split(test, validation, dtype)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        file = None if folder is None else (Path(folder) / "x.npy", _number(dtype))
        stacked = stack_rows(clients, file, labels)
        parts = Ragged.from_sizes(np.arange(len(stacked.y)), stacked.sizes)
        if stacked.splits is None:
            key = Key(seed, purpose="data/split")
            fractions = (1 - test - validation, validation, test)
            train, held, tested = split_clients(parts, fractions, key)
        else:
            if validation > 0:
                raise ConfigError(
                    f"validation={validation:g} does not apply to clients with their own split: "
                    'pass their validation rows, {"train": ..., "validation": ..., "test": ...}'
                )
            train, held, tested = _own_splits(parts, stacked.splits)
        x = _features(stacked.x, dtype)
        return cls(
            x=x,
            y=_targets(stacked.y, stacked.classes, x),
            train=train,
            validation=held,
            test=tested,
            profiles=({},) * len(parts) if profiles is None else tuple(profiles),
            name="own",
            classes=stacked.classes,
            source={"labels": list(stacked.labels)} if stacked.labels else {},
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


def _own_splits(parts: Ragged, splits: Indices) -> tuple[Ragged, Ragged, Ragged]:
    """Return the rows of each split; among a client's rows, the splits follow each other."""
    starts = parts.offsets[:-1, None] + np.cumsum(splits, axis=1) - splits
    train, held, tested = (
        Ragged.of([np.arange(at, at + n) for at, n in zip(starts[:, k], splits[:, k], strict=True)])
        for k in range(3)
    )
    return train, held, tested


def _range(parts: Sequence[Indices]) -> str:
    sizes = Ragged.of(parts).sizes
    if not len(sizes):
        return "0"
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def check_split(test: Any, validation: Any, dtype: Any) -> None:
    """Reject shares that are no numbers, and a dtype that is none of torch."""
    import torch

    for what, share in (("test", test), ("validation", validation)):
        if isinstance(share, bool) or not isinstance(share, Real):
            arrays = hasattr(share, "__len__") and not isinstance(share, str)
            shown = f"a {type(share).__name__}" if arrays else f"{share!r:.80}"
            remedy = (
                "; for your own split, give ClientData the row numbers of each split, "
                "ClientData(x, y, train, validation, test, ...)"
            )
            raise ConfigError(
                f"{what} must be a fraction of each client's rows, got {shown}"
                + (remedy if arrays else "")
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
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.from_numpy(x.data[:0]).dtype
    return as_tensor(np.asarray(y)).to(dtype if dtype.is_floating_point else torch.float32)


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
