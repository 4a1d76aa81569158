from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions import exponential, iid, linear, size, square
from parsifl.data.ragged import Ragged

RULES = (iid, linear, square, exponential)


@given(st.sampled_from(RULES), st.integers(1, 300), st.data())
def test_every_row_is_used_and_nobody_goes_empty(
    rule: Callable[[int, int, Key], Ragged], rows: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, rows))
    parts = rule(rows, clients, Key(0))
    assert sorted(parts.values.tolist()) == list(range(rows))
    assert parts.sizes.min() >= 1
    assert parts.sizes.tolist() == sorted(parts.sizes.tolist(), reverse=rule is iid)


def test_shares_are_proportional() -> None:
    assert iid(1000, 4, Key(0)).sizes.tolist() == [250] * 4
    assert np.allclose(linear(100_000, 4, Key(0)).sizes / 100_000, np.arange(1, 5) / 10, atol=1e-3)
    assert np.allclose(
        square(100_000, 3, Key(0)).sizes / 100_000, np.array([1, 4, 9]) / 14, atol=1e-3
    )
    expected = np.exp(np.arange(3)) / np.exp(np.arange(3)).sum()
    assert np.allclose(exponential(100_000, 3, Key(0)).sizes / 100_000, expected, atol=1e-3)


def test_rows_are_shuffled_by_the_key() -> None:
    assert iid(50, 2, Key(0))[0].tolist() != iid(50, 2, Key(1))[0].tolist()
    assert iid(50, 2, Key(0))[0].tolist() == iid(50, 2, Key(0))[0].tolist()


def test_given_sizes_are_kept() -> None:
    parts = size(100, None, Key(0), sizes=(10, 20, 5))
    assert parts.sizes.tolist() == [10, 20, 5]
    assert len(np.unique(parts.values)) == 35


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="add up to 101"):
        size(100, None, Key(0), sizes=(100, 1))
    with pytest.raises(ConfigError, match="2 sizes for 3 clients"):
        size(100, 3, Key(0), sizes=(1, 1))
    with pytest.raises(ConfigError, match="at least 1"):
        size(100, None, Key(0), sizes=())
    with pytest.raises(DataError, match="too few for 3"):
        iid(2, 3, Key(0))
