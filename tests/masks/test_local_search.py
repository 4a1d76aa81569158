"""Unequal weights and the objective V, against definitions written as loops and brute force."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks import MaskPlan, heuristics, local_search, optimal, replan
from parsifl.masks.feasible_sets import Catalogue
from parsifl.masks.instance import Instance, Objective, instance_of, value
from parsifl.masks.local_search import improve


def test_search_improves_random_designs_and_keeps_them_feasible() -> None:
    instance = instance_of([9, 7, 5, 3, 1], [12, 12, 12, 8, 25, 25])
    objectives: tuple[Objective, ...] = ("J", "bias")
    for objective in objectives:
        masks = heuristics.repaired(instance, heuristics.random(instance, Key(4)))
        stop = time.perf_counter() + 2.0
        better = improve(instance, masks, objective, Catalogue(instance), stop)
        assert instance.broken(better) is None
        assert value(instance, better, objective) < value(instance, masks, objective)


def test_search_leaves_an_optimum_alone() -> None:
    instance = instance_of([1, 1, 1, 1], [4, 4])
    masks = np.ones((2, 4), dtype=bool)
    stop = time.perf_counter() + 1.0
    assert improve(instance, masks, "J", Catalogue(instance), stop) is masks


OBJECTIVES: tuple[Objective, ...] = ("J", "bias", "V")


def by_loops(instance: Instance, masks: Any, objective: str) -> float:
    """Return the objective entry by entry, from k_nj = p_n m_nj / sum_n p_n m_nj."""
    devices, layers = masks.shape
    given = np.ones(devices) if instance.weights is None else instance.weights
    p = [given[n] if masks[n].any() else 0.0 for n in range(devices)]
    p = [part / sum(p) for part in p]
    k = np.zeros(masks.shape)
    for n, j in itertools.product(range(devices), range(layers)):
        if masks[n, j]:
            k[n, j] = p[n] / sum(p[m] for m in range(devices) if masks[m, j])
    sizes = instance.sizes
    if objective == "V":
        squares = sum(part**2 for part in p)
        covered = [j for j in range(layers) if masks[:, j].any()]
        return float(sum(sizes[j] * (sum(k[:, j] ** 2) - squares) for j in covered))
    bias = sum(sizes[j] * (k[n].max() - k[n, j]) for n in range(devices) for j in range(layers))
    slack = sum(instance.reach[n] - sizes[masks[n]].sum() for n in range(devices))
    return float(bias + slack if objective == "J" else bias)


def brute_force(instance: Instance, objective: str) -> float:
    """Return the least objective of all feasible designs."""
    sets = [np.array(s, bool) for s in itertools.product((0, 1), repeat=len(instance.sizes))]
    allowed = [
        [s for s in sets if instance.fits(s[None], instance.limits[n : n + 1])[0]]
        for n in range(instance.devices)
    ]
    return min(
        by_loops(instance, masks, objective)
        for design in itertools.product(*allowed)
        for masks in [np.array(design)]
        if instance.broken(masks) is None
    )


def fleets(count: int) -> list[Instance]:
    draw = np.random.default_rng(0)
    found: list[Instance] = []
    while len(found) < count:
        sizes = draw.integers(1, 9, size=3)
        budgets = [*draw.integers(sizes.min(), sizes.sum() + 1, size=3), sizes.sum()]
        found.append(instance_of(sizes.tolist(), budgets, draw.integers(1, 40, size=4)))
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_values_are_those_of_the_definition(objective: Objective) -> None:
    draw = np.random.default_rng(1)
    for instance in fleets(20):
        masks = draw.random((4, 3)) < 0.6
        masks[3] = True
        assert value(instance, masks, objective) == pytest.approx(
            by_loops(instance, masks, objective)
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_plans_for_weights_are_the_proven_optimum_of_small_fleets(objective: Objective) -> None:
    for instance in fleets(25):
        plan = optimal(
            instance.sizes.tolist(), instance.limits, objective, weights=instance.weights, nodes=50
        )
        assert plan.instance.broken(plan.masks) is None
        assert plan.value == pytest.approx(brute_force(instance, objective), abs=1e-9)
        assert plan.proven


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_exchange_finds_the_optimum_of_most_small_fleets(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_search, "_MOST_DESIGNS", 0)
    gaps = []
    for instance in fleets(25):
        plan = optimal(
            instance.sizes.tolist(), instance.limits, objective, weights=instance.weights, nodes=50
        )
        best = brute_force(instance, objective)
        assert plan.method == "exchange"
        assert plan.bound <= best + 1e-9
        assert plan.instance.broken(plan.masks) is None
        gaps.append(plan.value - best)
    assert min(gaps) > -1e-9
    assert np.mean(np.array(gaps) < 1e-9) >= 0.9


def test_idle_devices_and_unaffordable_layers_are_left_out_of_the_enumeration() -> None:
    plan = optimal([3, 5, 9], [2, 3, 8, 8], weights=[4, 1, 2, 3])
    expected = brute_force(instance_of([3, 5, 9], [2, 3, 8, 8], [4, 1, 2, 3]), "J")
    assert plan.proven
    assert plan.value == pytest.approx(expected)
    assert not plan.masks[0].any()
    assert not plan.masks[:, 2].any()


def test_a_plan_for_weights_that_is_not_proven_says_so() -> None:
    sizes, budgets = [3, 5, 7, 9, 11, 13], [8, 9, 12, 14, 20, 48]
    plan = optimal(sizes, budgets, weights=[1, 2, 3, 4, 5, 6], nodes=50)
    assert plan.method == "exchange"
    assert not plan.proven
    assert not plan.to_dict()["proven"]
    assert plan.gap > 0


def test_equal_weights_are_no_weights() -> None:
    plain = optimal([3, 5, 7], [8, 8, 15])
    equal = optimal([3, 5, 7], [8, 8, 15], weights=[10, 10, 10])
    assert (plain.masks == equal.masks).all()
    assert equal.proven


def test_the_variance_spreads_coverage_where_the_bias_concentrates_it() -> None:
    """Weak devices share one layer for J, and take different ones for V."""
    layers, budgets = [1, 1, 1, 1], [1, 1, 1, 1, 4]
    paper, spread = optimal(layers, budgets), optimal(layers, budgets, "V")
    assert paper.masks.sum(axis=0).tolist().count(5) == 1
    assert spread.masks.sum(axis=0).tolist() == [2, 2, 2, 2]
    assert pytest.approx(4 * (1 / 2 - 1 / 5)) == spread.V
    assert spread.proven


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_bias_is_below_the_floor(objective: Objective) -> None:
    """Bias >= d - mean trained parameters; random designs attain it within rounding."""
    draw = np.random.default_rng(2)
    for instance in fleets(30):
        masks = draw.random((4, 3)) < 0.6
        masks[~masks.any(axis=1), 0] = True
        masks[3] = True
        plan = MaskPlan(
            instance, masks, objective, by_loops(instance, masks, "bias"), 0.0, 0.0, "", 0.0,
            (0, 1, 2, 3),
        )  # fmt: skip
        assert instance.weights is not None
        mean = instance.weights @ (masks @ instance.sizes) / instance.weights.sum()
        assert plan.floor == pytest.approx(instance.total - mean)
        assert plan.bias >= plan.floor - 1e-9


def test_replanning_keeps_the_weights() -> None:
    plan = optimal([3, 5, 7], [8, 8, 8, 15], weights=[1, 2, 3, 4], nodes=50)
    left = replan(plan, [1])
    assert left.instance.weights is not None
    assert left.instance.weights.tolist() == [1, 3, 4]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -2.0], "ab", [1.0, float("nan")]])
def test_weights_that_are_none_are_rejected(weights: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        optimal([1, 2], [1, 3], weights=weights)
