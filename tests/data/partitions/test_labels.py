from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions import pathological, shard
from parsifl.data.ragged import Array

LABELS = np.repeat(np.arange(10), 60)


def held(labels: Array, part: Array) -> set[int]:
    return set(labels[part].tolist())


def test_client_u_holds_the_labels_u_and_u_plus_one() -> None:
    parts = pathological(LABELS, 20, Key(0))
    for client, part in enumerate(parts):
        assert held(LABELS, part) == {client % 10, (client + 1) % 10}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(10, 40),
    st.integers(1, 5),
    st.sampled_from(["cyclic", "dealt", "random"]),
    st.sampled_from(["equal", "unequal"]),
    st.integers(0, 99),
)
def test_no_row_is_given_twice_and_nobody_goes_empty(
    clients: int, classes: int, assign: str, sizes: str, seed: int
) -> None:
    labels = np.repeat(np.arange(10), 200)
    parts = pathological(labels, clients, Key(seed), classes=classes, assign=assign, sizes=sizes)
    assert len(parts) == clients
    assert len(np.unique(parts.values)) == len(parts.values)
    assert all(len(held(labels, part)) == classes for part in parts)
    if assign != "random":
        assert len(parts.values) == len(labels)


def test_unequal_chunks_lie_in_the_intended_range() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    for seed in range(50):
        sizes = pathological(labels, 4, Key(seed), classes=1).sizes
        rest = 1000
        for chunk in sizes[:-1]:  # U[rest / 5, rest / 2)
            assert rest // 5 <= chunk < rest // 2
            rest -= chunk
        assert sizes[-1] == rest


def test_equal_chunks_differ_by_at_most_one() -> None:
    sizes = pathological(np.zeros(11, dtype=np.int64), 4, Key(0), classes=1, sizes="equal").sizes
    assert sorted(sizes.tolist()) == [2, 3, 3, 3]


def test_dealing_gives_every_label_to_equally_many_clients() -> None:
    labels = np.repeat(np.arange(10), 500)
    parts = pathological(labels, 100, Key(5), classes=3, assign="dealt", sizes="equal")
    holders = np.zeros(10, dtype=int)
    for part in parts:
        holders[list(held(labels, part))] += 1
    assert holders.tolist() == [30] * 10


def test_gaps_between_labels_do_not_matter() -> None:
    labels = np.repeat(np.array([3, 7]), 10)
    assert [held(labels, part) for part in pathological(labels, 2, Key(0), classes=1)] == [{3}, {7}]


def test_impossible_demands_are_refused() -> None:
    with pytest.raises(ConfigError, match="classes=11 labels per client, but the data have 10"):
        pathological(LABELS, 20, Key(0), classes=11)
    with pytest.raises(ConfigError, match="assign must be"):
        pathological(LABELS, 20, Key(0), assign="fair")
    with pytest.raises(ConfigError, match="sizes must be"):
        pathological(LABELS, 20, Key(0), sizes="odd")
    with pytest.raises(DataError, match="label 0 has 60 rows for"):
        pathological(LABELS, 600, Key(0), classes=2)


def test_shards_are_runs_of_sorted_labels() -> None:
    parts = shard(LABELS, 30, Key(1))
    assert parts.sizes.tolist() == [20] * 30
    assert len(np.unique(parts.values)) == 600
    assert all(len(held(LABELS, part)) <= 2 for part in parts)


def test_shards_of_a_fixed_size_drop_the_rest() -> None:
    parts = shard(LABELS, 5, Key(1), shards=3, size=7)
    assert parts.sizes.tolist() == [21] * 5
    with pytest.raises(DataError, match="need 700 rows, but there are 600"):
        shard(LABELS, 10, Key(0), shards=7, size=10)
    with pytest.raises(ConfigError, match="shards must be"):
        shard(LABELS, 10, Key(0), shards=0)
