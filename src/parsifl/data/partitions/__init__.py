"""Ways to divide rows among clients: pure functions of labels, groups or features, and a key.

Names are those of flwr-datasets where it has the same rule.
"""

from __future__ import annotations

from parsifl.data.partitions.clusters import kmeans
from parsifl.data.partitions.dirichlet import dirichlet, inner_dirichlet
from parsifl.data.partitions.labels import pathological, shard
from parsifl.data.partitions.natural import natural_id
from parsifl.data.partitions.registry import describe_partition, partition, partition_names
from parsifl.data.partitions.sizes import exponential, iid, linear, size, square

__all__ = [
    "describe_partition",
    "dirichlet",
    "exponential",
    "iid",
    "inner_dirichlet",
    "kmeans",
    "linear",
    "natural_id",
    "partition",
    "partition_names",
    "pathological",
    "shard",
    "size",
    "square",
]
