from __future__ import annotations

import itertools

import numpy as np
import pytest

from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.feasible_sets import Catalogue, groups_of
from parsifl.masks.instance import Instance, Objective, instance_of, value
from parsifl.masks.milp import Program, knapsack_columns, set_columns


def least(instance: Instance, objective: Objective) -> float:
    """Enumerate every feasible design."""
    subsets = np.array(list(itertools.product([False, True], repeat=len(instance.sizes))))
    values = [
        value(instance, subsets[list(rows)], objective)
        for rows in itertools.product(range(len(subsets)), repeat=instance.devices)
        if instance.broken(subsets[list(rows)]) is None
    ]
    return min(values)


CASES = [
    ([3, 2, 2], [5, 3, 2]),
    ([1, 1, 1], [2, 2, 2]),
    ([4, 3, 1], [8, 4, 1]),
    ([2, 5], [7, 2, 2]),
]


@pytest.mark.parametrize("objective", ["J", "bias"])
@pytest.mark.parametrize(("sizes", "budgets"), CASES)
def test_any_buckets_bound_from_below_and_single_ones_are_exact(
    sizes: list[int], budgets: list[int], objective: Objective
) -> None:
    instance = instance_of(sizes, budgets)
    optimum = least(instance, objective)
    groups = groups_of(instance)
    columns = set_columns(groups, Catalogue(instance))
    for starts in [(1,), (1, 2), (1, 3), (1, 2, 3)]:
        answer = Program(instance, columns, starts, objective).solve(5.0, integral=True)
        assert answer.bound <= optimum + 1e-6
        if starts == (1, 2, 3):
            assert answer.bound == pytest.approx(optimum, abs=1e-6)
        relaxed = knapsack_columns(instance, groups)
        loose = Program(instance, relaxed, starts, objective).solve(5.0, integral=False)
        assert loose.bound <= answer.bound + 1e-6


def test_one_bucket_gives_the_coverage_bound_of_the_notes() -> None:
    # d (1 - Cmax / N) with Cmax = 78, found here by the program itself
    sizes = [928, 2528, 9152, 18048, 34688, 68864, 134912, *[268800] * 5, 531968, 1061888]
    total = sum(sizes)
    instance = instance_of(sizes, [0.75 * total] * 80 + [total] * 20)
    columns = set_columns(groups_of(instance), Catalogue(instance))
    answer = Program(instance, columns, (1,), "bias").solve(5.0, integral=True)
    assert answer.bound == pytest.approx(total * 0.22)
    assert answer.masks is not None
    masks = np.zeros((100, 14), dtype=bool)
    for group, rows in zip(groups_of(instance), answer.masks, strict=True):
        masks[group.members] = rows
    assert heuristics.repaired(instance, masks).sum(axis=0).min() == 78


def test_no_random_design_is_below_the_bound() -> None:
    generator = Key(5, purpose="test").numpy_generator()
    sizes = generator.integers(1, 50, 6).tolist()
    instance = instance_of(sizes, generator.uniform(0.3, 1.0, 12) * sum(sizes))
    columns = set_columns(groups_of(instance), Catalogue(instance))
    answer = Program(instance, columns, (1, 4, 8), "J").solve(5.0, integral=False)
    for masks in heuristics.random_family(instance, Key(0), 200):
        fixed = heuristics.repaired(instance, masks)
        assert instance.broken(fixed) is None
        assert value(instance, fixed, "J") >= answer.bound - 1e-6
