from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from parsifl.linear.sparsity.coordinates import hard_threshold, largest, largest_now, places

SMALL = st.lists(st.integers(-4, 4), min_size=1, max_size=12)


@given(SMALL, st.integers(0, 14))
def test_ties_go_to_the_lowest_position(values: list[int], count: int) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    order = np.argsort(-np.abs(np.array(values)), kind="stable")[:count]
    assert largest(vector, count).nonzero()[:, 0].tolist() == sorted(order.tolist())


@given(st.lists(SMALL.filter(lambda v: len(v) >= 3), min_size=1, max_size=4), st.integers(1, 3))
def test_a_batch_selects_row_by_row(rows: list[list[int]], count: int) -> None:
    width = min(len(row) for row in rows)
    matrix = torch.tensor([row[:width] for row in rows], dtype=torch.float64)
    alone = torch.stack([largest(row, count) for row in matrix])
    assert torch.equal(largest(matrix, count), alone)
    assert torch.equal(torch.func.vmap(lambda row: largest(row, count))(matrix), alone)


@given(st.lists(SMALL.filter(lambda v: len(v) >= 3), min_size=1, max_size=4), st.integers(0, 4))
def test_the_fast_selection_marks_the_same(rows: list[list[int]], count: int) -> None:
    width = min(len(row) for row in rows)
    matrix = torch.tensor([row[:width] for row in rows], dtype=torch.float64)
    assert torch.equal(largest_now(matrix, count), largest(matrix, count))


@given(SMALL.filter(lambda v: len(v) >= 3), st.integers(1, 3), st.integers(1, 12))
def test_nan_is_never_thresholded_to_zero(values: list[int], count: int, bad: int) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    vector[:bad] = torch.nan
    kept = hard_threshold(vector, count)
    assert kept.isnan().any()
    assert int((kept != 0).sum()) <= count
    assert torch.equal(largest_now(vector[None], count)[0], largest(vector, count))


def test_the_fast_selection_treats_nan_like_the_other() -> None:
    values = torch.tensor([[1.0, torch.nan, 3.0, 2.0], [4.0, 1.0, 3.0, 2.0]])
    assert torch.equal(largest_now(values, 2), largest(values, 2))


@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 4),
)
def test_places_list_the_marks(marks: list[list[bool]], least: int) -> None:
    index, valid = places(torch.tensor(marks), least)
    assert index.shape[1] == max(least, *(sum(row) for row in marks))
    for row, found, used in zip(marks, index, valid, strict=True):
        assert found[used].tolist() == [i for i, mark in enumerate(row) if mark]
        assert not found[~used].any()


@given(
    st.integers(1, 5),
    st.integers(1, 10),
    st.integers(0, 2**32 - 1),
)
def test_lemma_2_1_of_fed_ht(true: int, extra: int, seed: int) -> None:
    """|H_tau(x) - x*|^2 <= (1 + 2 sqrt(tau*) / sqrt(tau - tau*)) |x - x*|^2."""
    draw = np.random.default_rng(seed)
    width, tau = 20, min(true + extra, 20)
    target = np.zeros(width)
    target[draw.choice(width, true, replace=False)] = draw.standard_normal(true)
    x = target + draw.standard_normal(width) * draw.choice([0.01, 0.3, 3.0])
    cut = hard_threshold(torch.from_numpy(x), tau).numpy()
    alpha = 2 * np.sqrt(true) / np.sqrt(tau - true)
    left, right = ((cut - target) ** 2).sum(), (1 + alpha) * ((x - target) ** 2).sum()
    assert left <= right * (1 + 1e-12)
