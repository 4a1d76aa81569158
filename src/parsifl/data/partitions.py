"""Ways to divide rows among clients: pure functions of labels, groups or features, and a key.

Names follow flwr-datasets where it has the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from parsifl.core import config
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.registry import Registry
from parsifl.data.ragged import Array, Indices, Ragged

if TYPE_CHECKING:
    from parsifl.data.dataset import Dataset

Reads = Literal["rows", "labels", "groups", "dataset"]
Partitioner = Callable[..., Ragged]
DEFAULT_CLIENTS = 20
_ATTEMPTS = 10


@final
@dataclass(frozen=True)
class PartitionRule:
    """A registered partition: the function, and which part of a dataset it reads."""

    name: str
    reads: Reads
    function: Partitioner


_PARTITIONS = Registry[PartitionRule]("partition")


def partitioner(name: str, reads: Reads) -> Callable[[Partitioner], Partitioner]:
    """Register a function (rows | labels | groups | dataset, clients, key, *, options)."""

    def register(function: Partitioner) -> Partitioner:
        _PARTITIONS.add(name, PartitionRule(name, reads, function))
        return function

    return register


def partition_names() -> list[str]:
    """Return the names of all partitions, sorted."""
    return _PARTITIONS.names()


def describe_partition(name: str) -> dict[str, Any]:
    """Return what a partition does, what it reads and its options, as JSON values."""
    rule = _PARTITIONS.find(name)
    return {
        "name": rule.name,
        "reads": rule.reads,
        "options": {
            option: list(value) if isinstance(value, tuple) else value
            for option, value in config.option_defaults(rule.function).items()
        },
        "notes": (rule.function.__doc__ or "").strip(),
    }


def partition(
    name: str,
    dataset: Dataset,
    clients: int | None = None,
    key: Key | None = None,
    **options: Any,
) -> Ragged:
    """Divide the rows of a dataset; the name may carry options, as in "dirichlet:alpha=0.1".

    Parameters
    ----------
    clients
        The number of clients; None means all groups for natural-id, the number of sizes for size,
        and 20 otherwise.

    Returns
    -------
    Ragged
        For each client the numbers of its rows; no client is empty.
    """
    plain, written = config.parse(name)
    rule = _PARTITIONS.find(plain)
    bound = config.bind(f"partition '{rule.name}'", rule.function, {**written, **options})
    if clients is not None and clients < 1:
        raise ConfigError(f"the number of clients must be at least 1, got {clients}")
    if clients is None and rule.name not in ("natural-id", "size"):
        clients = DEFAULT_CLIENTS
    if clients is not None and clients > len(dataset):
        raise DataError(
            f"'{dataset.name}' has {len(dataset)} rows, too few for {clients} clients; "
            f"use at most {len(dataset)}"
        )
    source = _source(rule, dataset)
    parts = rule.function(source, clients, key or Key(0, purpose="data/partition"), **bound)
    empty = np.flatnonzero(parts.sizes == 0)
    if len(empty):
        raise DataError(
            f"partition '{rule.name}' leaves {len(empty)} of {len(parts)} clients without rows "
            f"(the first is client {empty[0]}); use fewer clients or other options"
        )
    return parts


def _source(rule: PartitionRule, dataset: Dataset) -> Any:
    if rule.reads == "rows":
        return len(dataset)
    if rule.reads == "dataset":
        return dataset
    if rule.reads == "groups":
        if dataset.groups is None:
            raise DataError(
                f"'{dataset.name}' has no natural groups (writer, hospital ...); "
                "use another partition than natural-id"
            )
        return dataset.groups
    if dataset.classes is None:
        raise DataError(
            f"partition '{rule.name}' needs class labels, but the target of '{dataset.name}' is "
            "a number; use iid, natural-id or kmeans"
        )
    return dataset.y


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
    """Give each client exactly the requested number of random rows (size:sizes=100+200+300)."""
    if clients is not None and clients != len(sizes):
        raise ConfigError(f"partition 'size' got {len(sizes)} sizes for {clients} clients")
    if not sizes or min(sizes) < 1:
        raise ConfigError("partition 'size' needs sizes of at least 1, such as sizes=100+200")
    if sum(sizes) > rows:
        raise DataError(f"the sizes add up to {sum(sizes)}, but there are {rows} rows")
    order = key.numpy_generator().permutation(rows)
    return Ragged.from_sizes(order[: sum(sizes)], np.asarray(sizes))


def _proportional(rows: int, weights: Array, key: Key) -> Ragged:
    """Use every row: one per client, and the others in proportion (largest remainders)."""
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
        dealt: shuffled lists of all labels are assigned one label at a time (PerFedMask).
        random: each client draws its labels (flwr-datasets).
    sizes
        unequal: of m clients that share a label, each except the last takes a share uniform in
        [1/(m + 1), 1/2) of the remaining rows, and the last takes the rest: the rule that
        pFedMe's generator intends, with every row used and no client without rows.
        equal: the clients that hold a label share it evenly.

    Rows whose label no client holds are dropped; that happens only with few clients.
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
    """Sort by label, cut into equal shards, and give `shards` random ones to each client.

    With size=0 all rows are used (shards differ by at most one row); otherwise a shard has `size`
    rows and the remaining rows are dropped. McMahan et al. (2017) use shards=2.
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
    reached the average number of rows gets nothing of the following classes. Up to ten draws are
    made until every client has `min_size` rows. flwr-datasets then fails; here, the draw with the
    fewest missing rows is repaired by moving random rows from the largest clients.
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
    An exhausted class is removed from the priors of the following clients. With `refill`
    (FedSLR, FedDyn) it is refilled instead: priors are met exactly, some rows belong to
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
    """Draw class counts by `prior`; counts above the remaining rows go to other classes."""
    counts = np.zeros(len(prior), dtype=np.int64)
    while counts.sum() < count:
        room = left - counts
        weights = np.where(room > 0, prior, 0.0)
        weights = weights if weights.sum() > 0 else (room > 0).astype(np.float64)
        wanted = draw.multinomial(count - counts.sum(), weights / weights.sum())
        counts += np.minimum(wanted, room)
    return counts


@partitioner("natural-id", reads="groups")
def natural_id(
    groups: Indices, clients: int | None, key: Key, *, min_size: int = 1, split: int = 1
) -> Ragged:
    """Give each group (writer, hospital, state ...) its own client, in the order of the groups.

    Groups with fewer than `min_size` rows are dropped. If a number of clients is given, that many
    groups are drawn at random. With `split`, the rows of each group are shuffled and divided among
    that many clients (30 devices of 6 domains: split=5).

    >>> natural_id(np.array([1, 0, 1]), None, Key(0))[1].tolist()
    [0, 2]
    """
    if split > 1:
        # groups of parts: the part of a row is its position in a shuffled order of its group
        shuffled = (
            key.replace(purpose="natural-id/split").numpy_generator().permutation(len(groups))
        )
        piece = np.empty(len(groups), np.int64)
        for group in np.unique(groups):
            members = shuffled[groups[shuffled] == group]
            piece[members] = np.arange(len(members)) * split // len(members)
        groups = np.unique(groups, return_inverse=True)[1] * split + piece
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


@partitioner("kmeans", reads="dataset")
def kmeans(
    dataset: Dataset,
    clients: int,
    key: Key,
    *,
    clusters: int = 10,
    parts: int = 20,
    picks: int = 2,
    by: str = "features",
) -> Ragged:
    """Cut each of `clusters` into `parts`; every client picks `picks` clusters and a part of each.

    Clusters come from K-means on the features, or are the labels (by=labels, for MNIST). Clients
    pick independently, so two may hold the same part, as the sizes in Fed-HT's Table II imply.
    """
    numbers = _clusters(dataset, clusters, by, key)
    present = np.unique(numbers)
    if not 1 <= picks <= len(present) or parts < 1:
        raise ConfigError(
            f"picks must be 1 to {len(present)}, the number of clusters, and parts at least 1; "
            f"got picks={picks}, parts={parts}"
        )
    draw = key.replace(purpose=f"{key.purpose}/picks").numpy_generator()
    pieces = []
    for cluster in present:
        rows = draw.permutation(np.flatnonzero(numbers == cluster))
        pieces.append(np.array_split(rows, min(parts, len(rows))))
    chosen = []
    for _ in range(clients):
        hand = draw.choice(len(present), picks, replace=False)
        chosen.append(np.concatenate([pieces[c][int(draw.integers(len(pieces[c])))] for c in hand]))
    return Ragged.of(chosen)


def _clusters(dataset: Dataset, clusters: int, by: str, key: Key) -> Array:
    if by == "labels":
        if dataset.classes is None:
            raise DataError(f"'{dataset.name}' has no labels; use by=features")
        return dataset.y
    if by != "features":
        raise ConfigError(f"by must be features or labels, got '{by}'")
    if not 1 <= clusters <= len(dataset):
        raise ConfigError(f"clusters must be 1 to {len(dataset)}, got {clusters}")
    from sklearn.cluster import KMeans

    x = dataset.x.reshape(len(dataset), -1) if isinstance(dataset.x, np.ndarray) else dataset.x
    model = KMeans(clusters, n_init=1, max_iter=50, random_state=key.word() % (1 << 32))
    return np.asarray(model.fit_predict(x))
