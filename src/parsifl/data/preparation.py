"""Prepare client data in one call: from the name of a dataset, or from your own arrays."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from parsifl.core import config
from parsifl.core.errors import ConfigError, DataError, unknown
from parsifl.core.keys import Key
from parsifl.data.client_rows import stack_rows
from parsifl.data.clients import ClientData, check_split
from parsifl.data.dataset import Dataset
from parsifl.data.partitions import partition as divide
from parsifl.data.ragged import Ragged
from parsifl.data.registry import Entry, entry, read
from parsifl.data.splits import group_tests, label_shares, personal_tests

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_DTYPES = ("float32", "float64")
_OFFICIAL_TESTS = ("all", "groups", "shares")


def prepare(
    name: str,
    clients: int | None = None,
    partition: str | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    test: float | str = 0.25,
    validation: float = 0.0,
) -> ClientData:
    """Load a dataset, divide it among clients, and scale it.

    Parameters
    ----------
    name
        A dataset, with its own options and any of normalize, dtype and augment after a colon:
        "synthetic:alpha=1,beta=1", "mnist:normalize=unit". Other options take the dataset's
        defaults (see `describe`).
    clients
        None means every natural group for the partition natural-id, and 20 otherwise.
    partition
        A partition, with options after a colon; None is the dataset's default.
    options
        More options of the partition.
    test
        A fraction of each client's rows (the official test split is then merged with the rest,
        as in pFedMe); or the part of the official test split that each client gets: "all" of it,
        its own "groups", or a draw by its label "shares" (FedSLR). "shares:size=500" draws about
        500 rows per client instead of 100; datasets with many labels need more.
    validation
        A fraction of each client's rows.

    >>> data = prepare("digits", clients=20)
    >>> len(data), data.classes, data.x.shape[1:]
    (20, 10, torch.Size([1, 8, 8]))
    """
    for what, number in (("clients", clients), ("seed", seed)):
        if isinstance(number, bool) or not isinstance(number, numbers.Integral | None):
            raise ConfigError(f"{what} must be a whole number, got {number!r}")
    plain, written = config.parse(name)
    registered = entry(plain)
    normalize = written.pop("normalize", registered.about.normalize)
    augment = written.pop("augment", registered.about.augment)
    dtype = _dtype(written.pop("dtype", registered.about.dtype))
    dataset = read(registered, data_dir, dict(written))
    share = _fraction(test)
    if share is not None:
        dataset = dataset.merged()
    parts = divide(
        partition or registered.about.partition,
        dataset,
        clients,
        Key(seed, purpose="data/partition"),
        **(options or {}),
    )
    held = share if share is not None else _official(registered, dataset, parts, str(test), seed)
    data = ClientData.from_dataset(
        dataset,
        parts,
        test=held,
        validation=validation,
        key=Key(seed, purpose="data/split"),
        normalize=normalize,
        dtype=dtype,
    )
    source = {
        **written,
        "partition": partition or registered.about.partition,
        **{f"partition_{name}": value for name, value in (options or {}).items()},
        "test": test if share is None else share,
        "validation": validation,
        "normalize": normalize,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return replace(data, augment="" if augment == "none" else augment, source=source)


def prepare_arrays(  # noqa: PLR0913 - keyword arguments with defaults
    x: Any,
    y: Any,
    *,
    clients: int | None = None,
    partition: str = "iid",
    groups: Any = None,
    test: float = 0.25,
    validation: float = 0.0,
    normalize: str = "none",
    seed: int = 0,
    labels: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> ClientData:
    """Divide your own rows among clients, and scale them.

    Parameters
    ----------
    x, y
        All rows, and one target per row: a label (a number or a word) or a real number.
    clients, partition
        As in `prepare`, for example ``partition="dirichlet:alpha=0.3"``.
    groups
        The natural client of each row, for ``partition="natural-id"``: numbers or words.
    test, validation
        The shares of each client's rows that are held out.
    normalize
        One of `parsifl.data.normalizations()`. Default: rows are used as they are.
    labels
        The order of labels that are words. Default: alphabetical.
    dtype
        The dtype of the features, such as torch.int64 for tokens. Default: torch.float32.

    Examples
    --------
    >>> rows, words = np.random.default_rng(0).normal(size=(90, 2)), ["no", "yes", "no"] * 30
    >>> data = prepare_arrays(rows, words, clients=5, partition="dirichlet:alpha=1")
    >>> len(data), data.classes, data.source["labels"]
    (5, 2, ['no', 'yes'])
    """
    check_split(test, validation, dtype)
    if dtype is not None and not dtype.is_floating_point and normalize != "none":
        raise ConfigError(
            f"normalize='{normalize}' makes real numbers of the features, which dtype={dtype} "
            "cannot hold; remove one of them"
        )
    stacked = stack_rows([(x, y)], labels=labels)
    named = None if groups is None else _natural_groups(groups)
    if named is None and config.parse(partition)[0] == "natural-id":
        raise ConfigError(
            "partition='natural-id' needs the natural client of each row: pass groups="
        )
    rows = Dataset(
        name="own",
        x=stacked.x,
        y=stacked.y,
        classes=stacked.classes,
        groups=None if named is None else named[1],
        group_names=() if named is None else tuple(str(name) for name in named[0]),
    )
    parts = divide(partition, rows, clients, Key(seed, purpose="data/partition"))
    data = ClientData.from_dataset(
        rows,
        parts,
        test=test,
        validation=validation,
        key=Key(seed, purpose="data/split"),
        normalize=normalize,
        dtype=dtype,
    )
    source = {
        "partition": partition,
        "test": test,
        "validation": validation,
        "normalize": normalize,
        **({"labels": list(stacked.labels)} if stacked.labels else {}),
    }
    return replace(data, source=source)


def _natural_groups(groups: Any) -> tuple[Any, Any]:
    """Return the distinct groups in order, and the position of each row's group among them."""
    values = np.asarray(groups)
    missing = [value is None or str(value) in ("nan", "<NA>") for value in values.tolist()]
    if any(missing):
        raise DataError(
            f"groups has no value in {sum(missing)} rows (the first is row {missing.index(True)}): "
            "remove these rows, or give them a group of their own"
        )
    if values.dtype.kind == "O":
        values = values.astype(str)
    distinct, positions = np.unique(values, return_inverse=True)
    return distinct, positions


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in _DTYPES:
        raise ConfigError(unknown("dtype of data", name, _DTYPES))
    return torch.float64 if name == "float64" else torch.float32


def _fraction(test: float | str) -> float | None:
    try:
        return float(test)
    except ValueError:
        return None


def _official(registered: Entry, dataset: Dataset, parts: Ragged, rule: str, seed: int) -> Ragged:
    """Return for each client its rows of the official test split."""
    rule, written = config.parse(rule)
    if rule not in _OFFICIAL_TESTS:
        raise ConfigError(unknown("test rule", rule, _OFFICIAL_TESTS) + ", or a fraction")
    options = config.bind(
        f"test rule '{rule}'", personal_tests if rule == "shares" else _whole, written
    )
    if dataset.test_y is None:
        raise DataError(
            f"'{registered.name}' has no official test split; use a fraction such as 0.25"
        )
    if rule == "all":
        return _whole(len(parts), len(dataset.test_y))
    if rule == "shares":
        if dataset.classes is None:
            raise DataError(f"'{registered.name}' has no labels to take shares of; use test=all")
        shares = label_shares(dataset.y, parts, dataset.classes)
        key = Key(seed, purpose="data/tests")
        return personal_tests(shares, dataset.test_y, key, **options)
    if dataset.groups is None or dataset.test_groups is None:
        raise DataError(
            f"the test split of '{registered.name}' has no groups; use test=shares or all"
        )
    owners = [np.unique(dataset.groups[part]) for part in parts]
    if any(len(owner) != 1 for owner in owners):
        raise DataError("test=groups needs clients of one group each: use partition natural-id")
    return group_tests([int(owner[0]) for owner in owners], dataset.test_groups)


def _whole(clients: int, rows: int) -> Ragged:
    """Return the whole test split for every client."""
    return Ragged.from_sizes(np.tile(np.arange(rows), clients), np.full(clients, rows))
