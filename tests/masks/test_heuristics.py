from __future__ import annotations

import numpy as np
import pytest

from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.instance import gammas, instance_of, value


def test_sequential_stops_at_the_first_layer_that_does_not_fit() -> None:
    instance = instance_of([1, 3, 1], [2, 5, 0])
    expected = [[True, False, False], [True, True, True], [False, False, False]]
    assert heuristics.sequential(instance).tolist() == expected


def test_sequential_mobilenet_is_that_of_the_notes() -> None:
    sizes = [928, 2528, 9152, 18048, 34688, 68864, 134912, *[268800] * 5, 531968, 1061888]
    total = sum(sizes)
    instance = instance_of(sizes, [total / 8] * 80 + [total] * 20)
    masks = heuristics.sequential(instance)
    assert value(instance, masks, "bias") == pytest.approx(2_565_580.8)
    assert value(instance, masks, "J") - 2_565_580.8 == pytest.approx(10_540_160)


def test_random_designs_keep_budgets_and_are_maximal() -> None:
    instance = instance_of([5, 4, 3, 2, 1], [3, 6, 9, 15])
    family = heuristics.random_family(instance, Key(1), 50)
    for masks in [*family, heuristics.random(instance, Key(2))]:
        assert instance.fits(masks, instance.limits).all()
        room = instance.limits - masks @ instance.sizes
        smallest = np.where(masks, np.inf, instance.sizes).min(axis=1)
        assert (smallest > room).all()


def test_random_designs_follow_from_the_key() -> None:
    instance = instance_of([5, 4, 3], [7, 7])
    first = heuristics.random_family(instance, Key(1), 20)
    assert (first == heuristics.random_family(instance, Key(1), 20)).all()
    assert (first != heuristics.random_family(instance, Key(2), 20)).any()


def test_best_of_random_is_the_best_feasible_one() -> None:
    instance = instance_of([5, 4, 3], [7, 5, 12])
    key = Key(3)
    family = heuristics.random_family(instance, key.replace(round=0), 40)
    feasible = [value(instance, m, "J") for m in family if instance.broken(m) is None]
    best = heuristics.best_of_random(instance, key, 40)
    assert best is not None
    assert value(instance, best, "J") == min(feasible)
    values = heuristics.family_values(instance, family, "bias")
    assert values == pytest.approx([value(instance, m, "bias") for m in family])


def test_best_of_random_says_none_if_no_draw_is_feasible() -> None:
    assert heuristics.best_of_random(instance_of([5, 5], [6]), Key(0), 10) is None


def test_topping_up_raises_no_gamma() -> None:
    instance = instance_of([5, 4, 3, 2, 1], [3, 6, 9, 15, 7])
    for masks in heuristics.random_family(instance, Key(6), 30):
        masks &= instance.sizes != 3  # leave room
        fixed = heuristics.repaired(instance, masks)
        full = heuristics.topped_up(instance, fixed)
        assert instance.broken(full) is None
        assert (full >= fixed).all()
        assert (gammas(full) <= gammas(fixed) + 1e-12).all()


def test_repair_covers_layers_and_wakes_idle_devices() -> None:
    instance = instance_of([2, 2, 3], [7, 4, 2])
    masks = np.array([[True, True, False], [True, True, False], [False, False, False]])
    fixed = heuristics.repaired(instance, masks)
    assert instance.broken(fixed) is None
