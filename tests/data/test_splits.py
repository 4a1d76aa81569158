from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.ragged import Ragged
from parsifl.data.splits import group_tests, label_shares, personal_tests, split, split_clients


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.floats(0, 0.5),
    st.floats(0, 0.4),
    st.integers(0, 5),
)
def test_every_row_is_used_once_and_every_client_trains(
    sizes: list[int], test: float, validation: float, seed: int
) -> None:
    parts = Ragged.from_sizes(np.arange(sum(sizes)), np.array(sizes))
    train, held, tested = split_clients(parts, (1 - test - validation, validation, test), Key(seed))
    for client, part in enumerate(parts):
        together = np.concatenate([train[client], held[client], tested[client]])
        assert sorted(together.tolist()) == part.tolist()
        assert len(train[client]) >= 1


@pytest.mark.parametrize(
    ("rows", "fractions", "expected"),
    [
        (100, (0.75, 0.0, 0.25), (75, 0, 25)),
        (10, (0.7, 0.1, 0.2), (7, 1, 2)),
        (2, (0.75, 0.0, 0.25), (1, 0, 1)),
        (1, (0.75, 0.0, 0.25), (1, 0, 0)),
        (7, (1.0, 0.0, 0.0), (7, 0, 0)),
        (4, (0.5, 0.5, 0.0), (2, 2, 0)),
        (3, (0.1, 0.45, 0.45), (1, 1, 1)),
    ],
)
def test_sizes_follow_the_documented_rounding(
    rows: int, fractions: tuple[float, float, float], expected: tuple[int, int, int]
) -> None:
    assert tuple(len(part) for part in split(np.arange(rows), fractions, Key(0))) == expected


def test_the_key_decides_and_later_clients_do_not_matter() -> None:
    both = split_clients([np.arange(50), np.arange(50, 60)], (0.5, 0, 0.5), Key(1))
    alone = split(np.arange(50), (0.5, 0, 0.5), Key(1))
    other = split(np.arange(50), (0.5, 0, 0.5), Key(2))
    assert both[0][0].tolist() == alone[0].tolist()
    assert alone[0].tolist() != other[0].tolist()


@pytest.mark.parametrize(
    "fractions", [(0.5, 0.0, 0.6), (1.2, 0.0, -0.2), (0.0, 0.5, 0.5), (np.nan, 0.0, np.nan)]
)
def test_impossible_shares_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match=r"shares|training"):
        split(np.arange(4), fractions, Key(0))


def test_splitting_a_million_clients_takes_arrays_not_a_loop() -> None:
    parts = Ragged.from_sizes(np.arange(3_000_000), np.full(1_000_000, 3))
    train, _, test = split_clients(parts, (0.7, 0, 0.3), Key(0))
    assert set(train.sizes) == {2}
    assert set(test.sizes) == {1}


def test_personal_tests_have_the_floor_of_each_label_share() -> None:
    test_y = np.repeat(np.arange(3), 60)
    shares = np.array([[0.5, 0.5, 0.0], [0.333, 0.333, 0.334]])
    tests = personal_tests(shares, test_y, Key(3), size=100)
    counts = [np.bincount(test_y[rows], minlength=3).tolist() for rows in tests]
    assert counts == [[50, 50, 0], [33, 33, 33]]
    assert all(len(np.unique(rows)) == len(rows) for rows in tests)


def test_personal_tests_say_which_label_is_too_rare() -> None:
    with pytest.raises(DataError, match="client 0 needs 100 test rows of label 1"):
        personal_tests(np.array([[0.0, 1.0]]), np.array([0, 1]), Key(0))


def test_group_tests_follow_the_groups() -> None:
    tests = group_tests([2, 0], np.array([0, 2, 2, 1]))
    assert [rows.tolist() for rows in tests] == [[1, 2], [0]]


def test_label_shares_count_by_brute_force() -> None:
    labels = np.array([0, 2, 2, 1, 2])
    shares = label_shares(labels, [np.array([0, 1, 2, 4]), np.zeros(0, dtype=np.int64)], 3)
    assert shares.tolist() == [[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]
