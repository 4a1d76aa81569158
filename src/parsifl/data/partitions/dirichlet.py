"""Label skew drawn from a Dirichlet distribution; both rules always end."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions.registry import partitioner
from parsifl.data.ragged import Array, Indices, Ragged

_ATTEMPTS = 10


@partitioner("dirichlet", reads="labels")
def dirichlet(
    labels: Indices,
    clients: int,
    key: Key,
    *,
    alpha: float = 0.5,
    min_size: int = 10,
    balance: bool = True,
) -> Ragged:
    """Divide each class among the clients by shares drawn from Dir(alpha).

    The rule of flwr-datasets (and of Yurochkin et al., 2019): with `balance`, a client that has
    reached the average number of rows gets nothing of the classes that follow. Up to ten draws are
    made until every client has `min_size` rows; where flwr-datasets then gives up, the draw with
    the fewest missing rows is repaired: the largest clients hand random rows to those below.
    """
    _check_alpha(alpha)
    min_size = max(min_size, 1)
    if min_size * clients > len(labels):
        raise DataError(
            f"{clients} clients with at least {min_size} rows need {min_size * clients} rows, but "
            f"there are {len(labels)}; use fewer clients or a smaller min_size"
        )
    draw = key.numpy_generator()
    best = _assign(labels, clients, alpha, balance, draw)
    for _ in range(_ATTEMPTS - 1):
        if _shortage(best, clients, min_size) == 0:
            break
        owners = _assign(labels, clients, alpha, balance, draw)
        best = min(best, owners, key=lambda o: _shortage(o, clients, min_size))
    _repair(best, clients, min_size, draw)
    counts = np.bincount(best, minlength=clients)
    return Ragged.from_sizes(np.argsort(best, kind="stable"), counts)


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and np.isfinite(alpha)):
        raise ConfigError(f"alpha must be a positive number, got {alpha:g}")


def _assign(
    labels: Indices, clients: int, alpha: float, balance: bool, draw: np.random.Generator
) -> Indices:
    """Return an owner for each row."""
    owners = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet(np.full(clients, alpha))
        if balance:
            open_ = sizes < len(labels) / clients
            # a tiny alpha can put the whole class on clients that are full already
            shares = shares * open_ if (shares * open_).sum() > 0 else open_.astype(np.float64)
            shares = shares / shares.sum()
        cuts = np.round(np.cumsum(shares) * len(rows)).astype(np.int64)
        cuts[-1] = len(rows)
        counts = np.diff(cuts, prepend=0)
        owners[rows] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return owners


def _shortage(owners: Indices, clients: int, min_size: int) -> int:
    sizes = np.bincount(owners, minlength=clients)
    return int(np.maximum(min_size - sizes, 0).sum())


def _repair(owners: Indices, clients: int, min_size: int, draw: np.random.Generator) -> None:
    """Move rows, in place, from the largest clients to those below `min_size`."""
    sizes = np.bincount(owners, minlength=clients)
    for poor in np.flatnonzero(sizes < min_size):
        while sizes[poor] < min_size:
            rich = int(np.argmax(sizes))
            spare = int(min(sizes[rich] - min_size, min_size - sizes[poor]))
            moved = draw.choice(np.flatnonzero(owners == rich), spare, replace=False)
            owners[moved] = poor
            sizes[rich] -= spare
            sizes[poor] += spare


@partitioner("inner-dirichlet", reads="labels")
def inner_dirichlet(
    labels: Indices,
    clients: int,
    key: Key,
    *,
    alpha: float = 0.1,
    size: int = 0,
    refill: bool = False,
) -> Ragged:
    """Give every client `size` rows by its own label prior, drawn from Dir(alpha).

    With size=0 every client gets an equal share of the rows.
    A class that has run out is taken out of the priors of the clients that follow. With `refill`
    (FedSLR, FedDyn) it is filled up again instead: priors are kept exactly, some rows belong to
    several clients, and some may belong to none.
    """
    _check_alpha(alpha)
    count = size or len(labels) // clients
    if count < 1 or (not refill and count * clients > len(labels)):
        raise DataError(
            f"{clients} clients with {count} rows each do not fit into {len(labels)} rows; "
            "use fewer clients, a smaller size, or refill=true"
        )
    draw = key.numpy_generator()
    known = np.unique(labels)
    queues = [draw.permutation(np.flatnonzero(labels == label)) for label in known]
    totals = np.array([len(queue) for queue in queues])
    used = np.zeros(len(known), dtype=np.int64)
    parts = []
    for _ in range(clients):
        prior = draw.dirichlet(np.full(len(known), alpha))
        left = np.full(len(known), count) if refill else totals - used
        counts = _draw_counts(prior, count, left, draw)
        parts.append(
            np.concatenate(
                [
                    queue.take(np.arange(start, start + wanted), mode="wrap")
                    for queue, start, wanted in zip(queues, used, counts, strict=True)
                ]
            )
        )
        used += counts
    return Ragged.of(parts)


def _draw_counts(prior: Array, count: int, left: Array, draw: np.random.Generator) -> Indices:
    """Draw class counts by `prior`; what exceeds the rows left goes to the other classes."""
    counts = np.zeros(len(prior), dtype=np.int64)
    while counts.sum() < count:
        room = left - counts
        weights = np.where(room > 0, prior, 0.0)
        weights = weights if weights.sum() > 0 else (room > 0).astype(np.float64)
        wanted = draw.multinomial(count - counts.sum(), weights / weights.sum())
        counts += np.minimum(wanted, room)
    return counts
