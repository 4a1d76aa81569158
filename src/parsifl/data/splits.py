"""Train, validation and test rows of each client, and personal test sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.ragged import Array, Indices, Ragged


def split(
    index: Indices, fractions: tuple[float, float, float], key: Key
) -> tuple[Indices, Indices, Indices]:
    """Divide the rows of one client into train, validation and test.

    >>> train, validation, test = split(np.arange(10), (0.7, 0.1, 0.2), Key(0))
    >>> len(train), len(validation), len(test)
    (7, 1, 2)
    """
    train, validation, test = split_clients(Ragged.of([index]), fractions, key)
    return train[0], validation[0], test[0]


def split_clients(
    parts: Sequence[Indices], fractions: tuple[float, float, float], key: Key
) -> tuple[Ragged, Ragged, Ragged]:
    """Divide the rows of every client into train, validation and test, at random by `key`.

    Of n rows, floor(n * train) but at least one are for training; the rest is divided between
    validation and test, with an odd row going to test. With any test share, a client with two rows
    has one of them for testing. Rows keep the order in which they were drawn.
    """
    shares = np.asarray(fractions, dtype=np.float64)
    valid = shares.shape == (3,) and np.all(shares >= -1e-12) and abs(shares.sum() - 1) <= 1e-9
    if not valid:  # NaN is not
        raise ConfigError(
            "train, validation and test shares must be numbers from 0 to 1 that add up to 1; "
            f"got {', '.join(f'{share:g}' for share in fractions)}"
        )
    if shares[0] <= 1e-12:
        raise ConfigError("nothing is left for training; lower the validation and test shares")
    ragged = Ragged.of(parts)
    owners, sizes = ragged.owners(), ragged.sizes
    order = np.lexsort((key.numpy_generator().random(len(ragged.values)), owners))
    shuffled = ragged.values[order]
    cuts = _cuts(sizes, shares)
    rank = np.arange(len(shuffled)) - np.repeat(ragged.offsets[:-1], sizes)
    stage = (rank >= cuts[0][owners]).astype(np.int64) + (rank >= cuts[1][owners])
    chosen = [
        Ragged.from_sizes(
            shuffled[stage == s], np.bincount(owners[stage == s], minlength=len(sizes))
        )
        for s in range(3)
    ]
    return chosen[0], chosen[1], chosen[2]


def _cuts(sizes: Indices, shares: Array) -> tuple[Indices, Indices]:
    """Return the ends of the training and validation rows of each client."""
    train = np.maximum(np.floor(sizes * shares[0] + 1e-9), np.minimum(sizes, 1)).astype(np.int64)
    held = max(shares[1] + shares[2], 1e-300)
    validation = np.floor((sizes - train) * (shares[1] / held) + 1e-9).astype(np.int64)
    if shares[1] + shares[2] <= 1e-12:
        train, validation = sizes, np.zeros_like(sizes)
    return train, train + validation


def label_shares(labels: Array, parts: Sequence[Indices], classes: int) -> Array:
    """Return the label distribution of each part: parts x classes, each row adding up to 1.

    >>> label_shares(np.array([0, 1, 1]), [np.array([0, 1]), np.array([2])], 2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    ragged = Ragged.of(parts)
    cells = ragged.owners() * classes + labels[ragged.values]
    table = np.bincount(cells, minlength=len(ragged) * classes).reshape(len(ragged), classes)
    shares: Array = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return shares


def group_tests(groups: Sequence[int], test_groups: Indices) -> Ragged:
    """Return for each client, given its natural group, the official test rows of that group."""
    return Ragged.of([np.flatnonzero(test_groups == group) for group in groups])


def personal_tests(shares: Array, test_y: Array, key: Key, *, size: int = 100) -> Ragged:
    """Draw for each client a test set with the label shares of its training rows (FedSLR).

    For each label, floor(share * size) rows of the official test split without replacement
    inside the client; different clients may draw the same row. Because of rounding down, a client
    has at most `size` rows.

    Parameters
    ----------
    shares
        clients x classes, as returned by `label_shares`.
    test_y
        Labels of the official test split.
    """
    by_label = [np.flatnonzero(test_y == label) for label in range(shares.shape[1])]
    wanted = np.floor(shares * size + 1e-9).astype(np.int64)
    available = np.array([len(rows) for rows in by_label])
    if np.any(wanted > available):
        client, label = np.argwhere(wanted > available)[0]
        raise DataError(
            f"client {client} needs {wanted[client, label]} test rows of label {label}, "
            f"but there are {available[label]}; lower size={size}"
        )
    parts: list[Indices] = []
    for client, counts in enumerate(wanted):
        draw = key.replace(client=client).numpy_generator()
        rows = [
            draw.choice(by_label[label], size=count, replace=False)
            for label, count in enumerate(counts)
            if count
        ]
        parts.append(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64))
    return Ragged.of(parts)
