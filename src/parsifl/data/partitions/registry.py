"""The partitions by name, with their declared options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.named import Registry
from parsifl.data.ragged import Ragged
from parsifl.data.spec import bind, defaults, parse

if TYPE_CHECKING:
    from parsifl.data.dataset import Dataset

Reads = Literal["rows", "labels", "groups", "dataset"]
Partitioner = Callable[..., Ragged]
DEFAULT_CLIENTS = 20


@final
@dataclass(frozen=True)
class PartitionRule:
    """A registered partition: the function, and what of a dataset it reads."""

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
            for option, value in defaults(rule.function).items()
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
        How many clients; None is every group for natural-id, as many as there are sizes for size,
        and 20 otherwise.

    Returns
    -------
    Ragged
        For each client the numbers of its rows; no client is empty.
    """
    plain, written = parse(name)
    rule = _PARTITIONS.find(plain)
    bound = bind(f"partition '{rule.name}'", rule.function, {**written, **options})
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
