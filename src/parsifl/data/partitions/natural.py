"""One client for each natural owner of rows."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.data.partitions.registry import partitioner
from parsifl.data.ragged import Indices, Ragged


@partitioner("natural-id", reads="groups")
def natural_id(
    groups: Indices, clients: int | None, key: Key, *, min_size: int = 1, split: int = 1
) -> Ragged:
    """Give each group (writer, hospital, state ...) its own client, in the order of the groups.

    Groups with fewer than `min_size` rows are left out. If a number of clients is given, that many
    groups are drawn at random. With `split`, the rows of each group are shuffled and divided among
    that many clients (30 devices of 6 domains: split=5).

    >>> natural_id(np.array([1, 0, 1]), None, Key(0))[1].tolist()
    [0, 2]
    """
    if split > 1:
        # groups of parts: the part of a row is its place in a shuffled order of its group
        shuffled = (
            key.replace(purpose="natural-id/split").numpy_generator().permutation(len(groups))
        )
        place = np.empty(len(groups), np.int64)
        for group in np.unique(groups):
            own = shuffled[groups[shuffled] == group]
            place[own] = np.arange(len(own)) * split // len(own)
        groups = np.unique(groups, return_inverse=True)[1] * split + place
    order = np.argsort(groups, kind="stable")
    present, counts = np.unique(groups, return_counts=True)
    everyone = Ragged.from_sizes(order, counts)
    eligible = np.flatnonzero(counts >= max(min_size, 1))
    if len(eligible) == 0 or (clients is not None and clients > len(eligible)):
        raise DataError(
            f"{len(eligible)} of {len(present)} groups have at least {min_size} rows, but "
            f"{clients or 'some'} clients are requested; use fewer, or a lower min_size"
        )
    if clients is not None:
        eligible = np.sort(key.numpy_generator().choice(eligible, clients, replace=False))
    if len(eligible) == len(present):
        return everyone
    return Ragged.of([everyone[int(group)] for group in eligible])
