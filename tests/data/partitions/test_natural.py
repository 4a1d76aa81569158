from __future__ import annotations

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.data.partitions import natural_id

GROUPS = np.array([2, 0, 2, 5, 0, 2])


def test_one_client_for_each_group_in_order() -> None:
    parts = natural_id(GROUPS, None, Key(0))
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]


def test_small_groups_are_left_out() -> None:
    parts = natural_id(GROUPS, None, Key(0), min_size=2)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5]]


def test_a_number_of_clients_draws_that_many_groups() -> None:
    groups = np.repeat(np.arange(50), 3)
    chosen = [natural_id(groups, 10, Key(seed)) for seed in (0, 0, 1)]
    assert chosen[0].values.tolist() == chosen[1].values.tolist() != chosen[2].values.tolist()
    assert all(len(set(groups[part])) == 1 for part in chosen[0])


def test_more_clients_than_groups_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 of 3 groups .* but 4 clients"):
        natural_id(GROUPS, 4, Key(0))
    with pytest.raises(DataError, match="0 of 3 groups"):
        natural_id(GROUPS, None, Key(0), min_size=9)


def test_a_group_can_be_split_among_several_clients() -> None:
    """DomainNet in PerFedMask: 30 devices of 6 domains."""
    groups = np.repeat(np.arange(6), [50, 40, 31, 20, 11, 7])
    parts = natural_id(groups, 30, Key(0), split=5)
    assert len(parts) == 30
    assert sorted(np.concatenate(list(parts)).tolist()) == list(range(len(groups)))
    for number, part in enumerate(parts):
        assert set(groups[part]) == {number // 5}
    sizes = parts.sizes.reshape(6, 5)
    assert (sizes.max(axis=1) - sizes.min(axis=1) <= 1).all()
