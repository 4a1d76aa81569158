"""Partitions that only look at the number of rows."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions.registry import partitioner
from parsifl.data.ragged import Array, Ragged


@partitioner("iid", reads="rows")
def iid(rows: int, clients: int, key: Key) -> Ragged:
    """Shuffle the rows and cut them into parts whose sizes differ by at most one.

    >>> iid(5, 2, Key(0)).sizes.tolist()
    [3, 2]
    """
    return _proportional(rows, np.ones(clients), key)


@partitioner("linear", reads="rows")
def linear(rows: int, clients: int, key: Key) -> Ragged:
    """Give client i a share proportional to i + 1."""
    return _proportional(rows, np.arange(1.0, clients + 1), key)


@partitioner("square", reads="rows")
def square(rows: int, clients: int, key: Key) -> Ragged:
    """Give client i a share proportional to (i + 1)^2."""
    return _proportional(rows, np.arange(1.0, clients + 1) ** 2, key)


@partitioner("exponential", reads="rows")
def exponential(rows: int, clients: int, key: Key) -> Ragged:
    """Give client i a share proportional to exp(i + 1), but at least one row."""
    return _proportional(rows, np.exp(np.arange(clients) - (clients - 1.0)), key)


@partitioner("size", reads="rows")
def size(rows: int, clients: int | None, key: Key, *, sizes: tuple[int, ...]) -> Ragged:
    """Give each client exactly the asked number of random rows (size:sizes=100+200+300)."""
    if clients is not None and clients != len(sizes):
        raise ConfigError(f"partition 'size' got {len(sizes)} sizes for {clients} clients")
    if not sizes or min(sizes) < 1:
        raise ConfigError("partition 'size' needs sizes of at least 1, such as sizes=100+200")
    if sum(sizes) > rows:
        raise DataError(f"the sizes add up to {sum(sizes)}, but there are {rows} rows")
    order = key.numpy_generator().permutation(rows)
    return Ragged.from_sizes(order[: sum(sizes)], np.asarray(sizes))


def _proportional(rows: int, weights: Array, key: Key) -> Ragged:
    """Use every row: one for each client, and the others in proportion (largest remainders)."""
    if len(weights) > rows:
        raise DataError(f"{rows} rows are too few for {len(weights)} clients")
    ideal = np.maximum(weights / weights.sum() * rows, 1.0)
    free = ideal - 1
    spare = rows - len(weights)
    ideal = 1 + free / free.sum() * spare if free.sum() > 0 else np.ones(len(weights))
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    remainders = np.argsort(counts - ideal, kind="stable")
    counts[remainders[: rows - counts.sum()]] += 1
    return Ragged.from_sizes(key.numpy_generator().permutation(rows), counts)
