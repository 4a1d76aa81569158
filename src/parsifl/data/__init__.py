"""Datasets, synthetic generators, partitions, and the client data that every engine consumes.

`prepare("mnist", clients=20, partition="pathological")` runs all steps: `load`, `partition` and
`ClientData`. Importing this package imports neither torch nor scikit-learn.
"""

from __future__ import annotations

from parsifl.data.clients import ClientData
from parsifl.data.dataset import Dataset
from parsifl.data.describe import bars, summary
from parsifl.data.normalize import normalizations
from parsifl.data.partitions import describe_partition, partition, partition_names
from parsifl.data.preparation import prepare, prepare_arrays
from parsifl.data.ragged import Ragged
from parsifl.data.registry import describe, fetch, load, names
from parsifl.data.splits import label_shares, personal_tests, split, split_clients

__all__ = [
    "ClientData",
    "Dataset",
    "Ragged",
    "bars",
    "describe",
    "describe_partition",
    "fetch",
    "label_shares",
    "load",
    "names",
    "normalizations",
    "partition",
    "partition_names",
    "personal_tests",
    "prepare",
    "prepare_arrays",
    "split",
    "split_clients",
    "summary",
]
