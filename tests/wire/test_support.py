from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parsifl.wire import support


def _mask(size: int, count: int, seed: int = 0) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[np.random.default_rng(seed).choice(size, count, replace=False)] = True
    return mask


def _decode(data: bytes, size: int, count: int) -> list[int]:
    return [int(i) for chunk in support.decode(memoryview(data), size, count) for i in chunk]


@given(st.lists(st.booleans(), max_size=200))
def test_every_set_comes_back_in_ascending_order(flags: list[bool]) -> None:
    mask = np.array(flags, np.bool_)
    count = int(mask.sum())
    assert _decode(support.encode(mask, count), mask.size, count) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("size", [1_000, 10_000, 100_000, 1_000_000, 10_000_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_support_is_within_one_percent_of_the_bound_plus_16_bytes(
    size: int, density: float
) -> None:
    count = int(size * density)
    mask = _mask(size, count)
    data = support.encode(mask, count)
    assert 8 * len(data) <= 1.01 * support.bound(size, count) + 8 * 16
    found = np.concatenate(list(support.decode(memoryview(data), size, count)))
    np.testing.assert_array_equal(found, np.flatnonzero(mask))


@pytest.mark.parametrize("arrangement", ["first", "last", "every tenth"])
def test_no_arrangement_is_longer_than_the_bound_and_a_few_words(arrangement: str) -> None:
    size, count = 100_000, 10_000
    mask = np.zeros(size, np.bool_)
    where = {"first": slice(count), "last": slice(-count, None), "every tenth": slice(0, None, 10)}
    mask[where[arrangement]] = True
    data = support.encode(mask, count)
    assert len(data) <= support.bound(size, count) / 8 + 12
    assert _decode(data, size, count) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(("size", "count"), [(5, 2), (1000, 1), (1000, 500), (1000, 1000), (7, 0)])
def test_bound_is_the_logarithm_of_the_number_of_sets(size: int, count: int) -> None:
    assert support.bound(size, count) == pytest.approx(math.log2(math.comb(size, count)), abs=1e-6)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_all_and_none_need_no_bytes(size: int) -> None:
    for count in (0, size):
        mask = np.full(size, count > 0)
        assert support.encode(mask, count) == b""
        chunks = list(support.decode(memoryview(b""), size, count))
        assert np.array_equal(np.concatenate([np.zeros(0, int), *chunks]), np.arange(count))


@pytest.mark.parametrize("change", ["count up", "count down", "cut", "zero word", "more", "flip"])
def test_bytes_that_code_something_else_are_refused(change: str) -> None:
    size, count = 5_000, 500
    data = support.encode(_mask(size, count), count)
    flipped = bytes([data[0] ^ 1]) + data[1:]
    forged = {
        "count up": (data, count + 1),
        "count down": (data, count - 1),
        "cut": (data[4:], count),
        "zero word": (data + bytes(4), count),
        "more": (data + b"abcd", count),
        "flip": (flipped, count),
    }
    with pytest.raises(ValueError, match=r"support does not code|Invalid compressed data"):
        _decode(forged[change][0], size, forged[change][1])


def test_the_code_is_pinned_since_receivers_may_run_another_release() -> None:
    mask = np.arange(200) % 7 == 0
    assert support.encode(mask, 29).hex() == "ce0c2e34d6ec28b9015444ab66c3e195900a0000"


def test_never_yields_more_positions_than_announced() -> None:
    size, count = 1_000, 10
    found: list[int] = []
    dense = support.encode(_mask(size, 900), 900)
    chunks = (chunk.tolist() for chunk in support.decode(memoryview(dense), size, count))
    with pytest.raises(ValueError, match="support does not code"):
        found.extend(position for chunk in chunks for position in chunk)
    assert len(found) <= count


@pytest.mark.slow
def test_eleven_million_entries_are_coded_in_half_a_second() -> None:
    mask = _mask(11_000_000, 550_000)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        support.encode(mask, 550_000)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
