from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsifl.masks.feasible_sets import Catalogue, _knapsack, fill, groups_of
from parsifl.masks.instance import Instance, instance_of


def with_tail(sizes: list[int], tail: list[int], limit: float) -> Instance:
    instance = instance_of(sizes, [limit])
    return replace(instance, tail=np.array(tail, dtype=float))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    limit=st.integers(0, 30),
    step=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_maximal_sets_are_those_that_nothing_can_join(
    sizes: list[int], limit: int, step: int
) -> None:
    tail = [step * (len(sizes) - 1 - j) for j in range(len(sizes))]
    instance = with_tail(sizes, tail, limit)

    def cost(chosen: frozenset[int]) -> int:
        return sum(sizes[j] for j in chosen) + tail[min(chosen)]

    everything = range(len(sizes))
    fitting = {
        frozenset(some)
        for count in range(1, len(sizes) + 1)
        for some in itertools.combinations(everything, count)
        if cost(frozenset(some)) <= limit
    }
    expected = {s for s in fitting if not any(s < other for other in fitting)}
    catalogue = Catalogue(instance)
    found = {frozenset(np.flatnonzero(row).tolist()) for row in catalogue.maximal(float(limit))}
    assert found == expected
    if fitting:
        most = max(sum(sizes[j] for j in s) for s in fitting)
        assert catalogue.fullest(float(limit))[0] == most
        bound, row = _knapsack(instance, float(limit))
        assert bound == pytest.approx(most, abs=1e-6)
        assert row @ instance.sizes == most


def test_fill_skips_what_no_longer_fits() -> None:
    instance = instance_of([4, 3, 2], [6])
    assert fill(instance, np.array([0, 1, 2]), 6.0).tolist() == [True, False, True]


def test_groups_leave_out_devices_that_can_train_nothing() -> None:
    instance = instance_of([4, 3], [1, 7, 3, 7])
    assert [group.members.tolist() for group in groups_of(instance)] == [[2], [1, 3]]
