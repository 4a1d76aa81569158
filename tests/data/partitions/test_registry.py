from __future__ import annotations

import json

import numpy as np
import pytest

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.registry import Registry
from parsifl.data import partitions
from parsifl.data.dataset import Dataset
from parsifl.data.partitions import describe_partition, partition, partition_names
from parsifl.data.ragged import Ragged

LABELS = np.repeat(np.arange(10), 40)
DATASET = Dataset("toy", np.zeros((400, 2)), LABELS, classes=10, groups=LABELS)


@pytest.mark.parametrize("name", partition_names())
def test_every_partition_is_described_and_runs_by_its_name(name: str) -> None:
    facts = describe_partition(name)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["notes"]
    spec = {"size": "size:sizes=10+20", "kmeans": "kmeans:by=labels"}.get(name, name)
    first, again = (partition(spec, DATASET, None, Key(1)) for _ in range(2))
    assert first.sizes.min() >= 1
    assert np.array_equal(first.values, again.values)


def test_the_names_are_those_of_flwr_datasets_where_it_has_them() -> None:
    shared = {"iid", "size", "linear", "square", "exponential", "dirichlet", "inner-dirichlet"}
    assert shared | {"pathological", "shard", "natural-id"} <= set(partition_names())


def test_options_come_from_text_or_from_keywords() -> None:
    spec = partition("pathological:classes=3", DATASET, 10, Key(0))
    words = partition("pathological", DATASET, 10, Key(0), classes=3)
    assert np.array_equal(spec.values, words.values)


def test_unknown_names_and_options_are_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        partition("dirichlt", DATASET)
    with pytest.raises(ConfigError, match="unknown option of partition 'dirichlet' 'alpa'"):
        partition("dirichlet:alpa=1", DATASET)
    with pytest.raises(ConfigError, match="needs the option 'sizes'"):
        partition("size", DATASET)


def test_too_many_clients_are_refused() -> None:
    with pytest.raises(DataError, match="400 rows, too few for 401 clients"):
        partition("iid", DATASET, 401)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        partition("iid", DATASET, 0)


def test_a_partition_that_leaves_a_client_empty_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hollow(rows: int, clients: int, _key: Key) -> Ragged:
        return Ragged.of([list(range(rows)), *[[]] * (clients - 1)])

    rules = Registry[partitions.PartitionRule]("partition")
    monkeypatch.setattr(partitions, "_PARTITIONS", rules)
    partitions.partitioner("hollow", reads="rows")(hollow)
    with pytest.raises(DataError, match=r"leaves 2 of 3 clients without rows .*client 1"):
        partition("hollow", DATASET, 3)
