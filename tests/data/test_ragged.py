from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.core.errors import DataError
from parsifl.data.ragged import Ragged


@given(st.lists(st.integers(0, 6), max_size=8))
def test_behaves_like_the_list_it_was_made_of(sizes: list[int]) -> None:
    parts = [[10 * number + i for i in range(size)] for number, size in enumerate(sizes)]
    ragged = Ragged.of(parts)
    assert [part.tolist() for part in ragged] == parts
    assert ragged.sizes.tolist() == [len(part) for part in parts]
    assert ragged.owners().tolist() == [i for i, part in enumerate(parts) for _ in part]


def test_negative_positions_and_slices_count_as_in_a_list() -> None:
    ragged = Ragged.of([[1], [2, 3], []])
    assert ragged[-2].tolist() == [2, 3]
    assert [part.tolist() for part in ragged[1:]] == [[2, 3], []]
    with pytest.raises(IndexError):
        ragged[3]


def test_an_item_is_a_view_of_a_memory_mapped_array(tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", np.arange(10))
    values = np.load(tmp_path / "values.npy", mmap_mode="r")
    ragged = Ragged(values, np.array([0, 4, 10]))
    assert np.shares_memory(ragged[1], values)


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 4], [0, 2, 1, 3], []])
def test_offsets_that_do_not_cover_the_values_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="offsets"):
        Ragged(np.arange(3), np.array(offsets, dtype=np.int64))


def test_a_million_parts_are_two_arrays() -> None:
    ragged = Ragged.from_sizes(np.arange(2_000_000), np.full(1_000_000, 2))
    assert len(ragged) == 1_000_000
    assert ragged[999_999].tolist() == [1_999_998, 1_999_999]
    assert len(Ragged.empty(1_000_000)[5]) == 0
