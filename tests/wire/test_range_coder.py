from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from parsifl.wire import range_coder


def _mask(size: int, count: int, seed: int = 0) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[np.random.default_rng(seed).choice(size, count, replace=False)] = True
    return mask


def _decode(data: bytes, size: int, count: int) -> list[int]:
    return [int(i) for chunk in range_coder.decode(memoryview(data), size, count) for i in chunk]


@given(st.lists(st.booleans(), max_size=200))
def test_every_set_comes_back_in_ascending_order(flags: list[bool]) -> None:
    mask = np.array(flags, np.bool_)
    count = int(mask.sum())
    assert (
        _decode(range_coder.encode(mask, count), mask.size, count) == np.flatnonzero(mask).tolist()
    )


def test_every_set_of_a_size_has_a_code_of_its_own_and_the_same_length() -> None:
    for size in range(9):
        for count in range(size + 1):
            masks = [m for m in itertools.product([False, True], repeat=size) if sum(m) == count]
            codes = [range_coder.encode(np.array(mask, np.bool_), count) for mask in masks]
            assert len(set(codes)) == math.comb(size, count)
            assert {len(code) for code in codes} == {range_coder.length(size, count)}
            for mask, code in zip(masks, codes, strict=True):
                assert _decode(code, size, count) == [i for i, one in enumerate(mask) if one]


@pytest.mark.parametrize("size", [1, 2, 8, 63, 64, 65, 300, 1000])
def test_the_length_is_that_of_independent_events_in_exact_integers(size: int) -> None:
    for count in range(1, size):
        # the inverse of (k / d)^k (1 - k / d)^(d - k), which 256^length must reach
        above = size**size
        below = count**count * (size - count) ** (size - count)
        length = range_coder.length(size, count)
        assert 256**length * below > above
        assert 1000 * 256 ** (length - 1) * below < 1001 * above


@pytest.mark.parametrize("size", [1_000, 10_000, 100_000, 1_000_000, 10_000_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_support_is_within_three_bytes_of_the_bound(size: int, density: float) -> None:
    count = int(size * density)
    mask = _mask(size, count)
    data = range_coder.encode(mask, count)
    bits = math.comb(size, count).bit_length() if size < 10**6 else range_coder.bound(size, count)
    assert 8 * len(data) <= bits + 8 * 3
    assert len(data) == range_coder.length(size, count)
    found = np.concatenate(list(range_coder.decode(memoryview(data), size, count)))
    np.testing.assert_array_equal(found, np.flatnonzero(mask))


def _arranged(size: int, start: int, step: int, run: int, flip: bool) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (np.arange(size) + start) % step < run
    return mask ^ flip


@settings(deadline=None)
@given(
    st.integers(0, 5_000), st.integers(0, 5_000), st.integers(1, 5_000), st.integers(0, 300),
    st.booleans(),
)  # fmt: skip
def test_the_length_is_known_before_coding_however_the_ones_lie(
    size: int, start: int, step: int, run: int, flip: bool
) -> None:
    mask = _arranged(size, start, step, run, flip)
    count = int(mask.sum())
    data = range_coder.encode(mask, count)
    assert len(data) == range_coder.length(size, count)
    assert _decode(data, size, count) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("arrangement", ["first", "last", "every tenth", "ends"])
def test_no_arrangement_is_longer(arrangement: str) -> None:
    size, count = 2_100_000, 210_000
    mask = np.zeros(size, np.bool_)
    where = {"first": slice(count), "last": slice(-count, None), "every tenth": slice(0, None, 10)}
    mask[where.get(arrangement, slice(count // 2))] = True
    if arrangement == "ends":
        mask[-(count // 2) :] = True
    data = range_coder.encode(mask, count)
    assert len(data) == range_coder.length(size, count)
    assert _decode(data, size, count) == np.flatnonzero(mask).tolist()


def test_a_carry_runs_through_many_words() -> None:
    # the middle half again and again nears 1/2 from below, 0.01111..., and then goes beyond it
    quarter = 1 << 126
    model = range_coder._Model(
        [0, quarter, 3 * quarter, 4 * quarter], [quarter, 2 * quarter, quarter]
    )
    counts = [1] * 1000 + [2, 0, 1, 2]
    writer = range_coder._Writer()
    writer.write(model, counts, [0] * len(counts))
    data = writer.finished(130)
    assert data[:125] == b"\x80" + bytes(124)
    reader = range_coder._Reader(data)
    assert reader.read(model, len(counts)) == (counts, [0] * len(counts))
    assert reader.is_exact()


@pytest.mark.parametrize(("size", "count"), [(5, 2), (1000, 1), (1000, 500), (1000, 1000), (7, 0)])
def test_bound_is_the_logarithm_of_the_number_of_sets(size: int, count: int) -> None:
    assert range_coder.bound(size, count) == pytest.approx(
        math.log2(math.comb(size, count)), abs=1e-6
    )


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_all_and_none_need_no_bytes(size: int) -> None:
    for count in (0, size):
        mask = np.full(size, count > 0)
        assert range_coder.encode(mask, count) == b""
        chunks = list(range_coder.decode(memoryview(b""), size, count))
        assert np.array_equal(np.concatenate([np.zeros(0, int), *chunks]), np.arange(count))


@pytest.mark.parametrize("change", ["count up", "count down", "cut", "zeros", "more", "flip"])
def test_bytes_that_code_something_else_are_refused(change: str) -> None:
    size, count = 5_000, 500
    data = range_coder.encode(_mask(size, count), count)
    flipped = bytes([data[0] ^ 1]) + data[1:]
    forged = {
        "count up": (data, count + 1),
        "count down": (data, count - 1),
        "cut": (data[1:], count),
        "zeros": (data + bytes(8), count),
        "more": (data + b"abcd", count),
        "flip": (flipped, count),
    }
    with pytest.raises(ValueError, match="support "):
        _decode(forged[change][0], size, forged[change][1])


def test_the_code_is_pinned_since_receivers_may_run_another_release() -> None:
    mask = np.arange(200) % 7 == 0
    assert range_coder.encode(mask, 29).hex() == "aa8756116a9cdc3dd23443812d930b"


def test_never_yields_more_positions_than_announced() -> None:
    size, count = 1_000, 10
    found: list[int] = []
    dense = range_coder.encode(_mask(size, 900), 900)
    chunks = (chunk.tolist() for chunk in range_coder.decode(memoryview(dense), size, count))
    with pytest.raises(ValueError, match="support does not code"):
        found.extend(position for chunk in chunks for position in chunk)
    assert len(found) <= count


@pytest.mark.slow
def test_eleven_million_entries_are_coded_in_half_a_second() -> None:
    mask = _mask(11_000_000, 550_000)
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        range_coder.encode(mask, 550_000)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < (0.5 if sys.gettrace() is None else 1.0)  # coverage takes as long again


@pytest.mark.parametrize("count", [-1, 11, 1e300, True])
def test_a_count_that_cannot_be_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="not a support"):
        list(range_coder.decode(memoryview(b"ab"), 10, count))
