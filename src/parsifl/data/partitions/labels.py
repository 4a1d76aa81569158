"""Partitions that give each client a few labels only."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions.registry import partitioner
from parsifl.data.ragged import Array, Indices, Ragged


@partitioner("pathological", reads="labels")
def pathological(
    labels: Indices,
    clients: int,
    key: Key,
    *,
    classes: int = 2,
    assign: str = "cyclic",
    sizes: str = "unequal",
) -> Ragged:
    """Give every client `classes` labels.

    Parameters
    ----------
    assign
        cyclic: client u holds the labels u, u + 1 ... modulo their number (pFedMe, FedMac).
        dealt: shuffled decks of all labels are dealt out, one label at a time (PerFedMask).
        random: each client draws its labels (flwr-datasets).
    sizes
        unequal: of m clients that share a label, each but the last takes a share uniform in
        [1/(m + 1), 1/2) of what the ones before it left, the last takes the rest: the rule that
        pFedMe's generator intends, with every row used and every client served.
        equal: the clients that hold a label share it evenly.

    Rows whose label no client holds are left out; that only happens with few clients.
    """
    known = np.unique(labels)
    if not 1 <= classes <= len(known):
        raise ConfigError(
            f"classes={classes} labels per client, but the data have {len(known)}; "
            f"use classes=1 to {len(known)}"
        )
    if sizes not in ("unequal", "equal"):
        raise ConfigError(f"sizes must be unequal or equal, got '{sizes}'")
    draw = key.numpy_generator()
    hands = _hands(assign, len(known), clients, classes, draw)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for position, label in enumerate(known):
        holders = np.flatnonzero((hands == position).any(axis=1))
        if len(holders) == 0:
            continue
        rows = draw.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(holders):
            raise DataError(
                f"label {label} has {len(rows)} rows for {len(holders)} clients; "
                "use fewer clients or fewer classes per client"
            )
        counts = _counts(len(rows), len(holders), sizes, draw)
        for holder, chunk in zip(holders, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            parts[holder].append(chunk)
    return Ragged.of([np.concatenate(part) for part in parts])


def _hands(
    assign: str, labels: int, clients: int, classes: int, draw: np.random.Generator
) -> Array:
    """Return the labels that each client holds: clients x classes."""
    if assign == "cyclic":
        return (np.arange(clients)[:, None] + np.arange(classes)) % labels
    if assign == "random":
        return np.stack([draw.permutation(labels)[:classes] for _ in range(clients)])
    if assign != "dealt":
        raise ConfigError(f"assign must be cyclic, dealt or random, got '{assign}'")
    deck: list[int] = []
    hands = np.empty((clients, classes), dtype=np.int64)
    for client in range(clients):
        hand: list[int] = []
        while len(hand) < classes:
            new = [label for label in deck if label not in hand]
            if not new:
                deck += draw.permutation(labels).tolist()
                continue
            hand.append(new[0])
            deck.remove(new[0])
        hands[client] = hand
    return hands


def _counts(rows: int, holders: int, sizes: str, draw: np.random.Generator) -> Indices:
    if sizes == "equal":
        return rows // holders + (np.arange(holders) < rows % holders).astype(np.int64)
    counts, rest = [], rows
    for waiting in range(holders - 1, 0, -1):
        low = rest // (holders + 1)
        share = int(draw.integers(low, max(rest // 2, low + 1)))
        counts.append(min(max(share, 1), rest - waiting))  # one row is kept for each in waiting
        rest -= counts[-1]
    return np.array([*counts, rest], dtype=np.int64)


@partitioner("shard", reads="labels")
def shard(labels: Indices, clients: int, key: Key, *, shards: int = 2, size: int = 0) -> Ragged:
    """Sort by label, cut into equal shards, and deal `shards` random ones to each client.

    With size=0 all rows are used (shards differ by at most one row); otherwise a shard has `size`
    rows and the rows left over are dropped. McMahan et al. (2017) use shards=2.
    """
    count = clients * shards
    if shards < 1 or size < 0:
        raise ConfigError(f"shards must be at least 1 and size at least 0, got {shards}, {size}")
    if count * max(size, 1) > len(labels):
        raise DataError(
            f"{count} shards of at least {max(size, 1)} rows need {count * max(size, 1)} rows, "
            f"but there are {len(labels)}; use fewer clients, or fewer or smaller shards"
        )
    draw = key.numpy_generator()
    shuffled = draw.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if size:
        pieces = np.split(order[: len(order) // size * size], len(order) // size)
    else:
        pieces = np.array_split(order, count)
    dealt = draw.permutation(len(pieces))[:count].reshape(clients, shards)
    return Ragged.of([np.concatenate([pieces[piece] for piece in hand]) for hand in dealt])
