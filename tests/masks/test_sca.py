from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks import compare, optimal
from parsifl.masks.instance import instance_of, value
from parsifl.masks.sca import _rounded, _start, sca


def test_missing_cvxpy_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ConfigError, match=r"parsifl\[sca\]"):
        sca(instance_of([1, 1], [1, 2]))


def test_budgets_that_are_not_additive_are_refused() -> None:
    instance = replace(instance_of([1, 1], [1, 2]), tail=np.ones(2))
    with pytest.raises(ConfigError, match="additive budgets only"):
        sca(instance)


def test_start_is_the_best_of_sequential_and_random() -> None:
    instance = instance_of([1, 1, 1, 1], [2, 2, 4])
    assert value(instance, _start(instance, Key(0)), "J") == 2.0


def test_rounding_keeps_the_budget_and_the_largest_values() -> None:
    instance = instance_of([2, 2, 2], [4, 6])
    relaxed = np.array([[0.6, 0.9, 0.7], [1.0, 1.0, 1.0]])
    assert _rounded(instance, relaxed)[0].tolist() == [False, True, True]


def test_a_fleet_is_planned_and_compared() -> None:
    """Ten devices, five layers: the best of 1000 random designs is where it starts."""
    pytest.importorskip("cvxpy", reason="the extra parsifl[sca] is not installed")
    plan = optimal([464, 4672, 18560, 73984, 147712], [80_000] * 6 + [245_392] * 4, seconds=3)
    table = {row["design"]: row for row in compare(plan, draws=50, sca=True)}
    found = table["SCA (Algorithm 3)"]
    assert found["problem"] is None
    assert plan.bound <= found["J"] < table["sequential"]["J"]


def test_result_is_feasible_and_never_below_the_optimum() -> None:
    pytest.importorskip("cvxpy", reason="the extra parsifl[sca] is not installed")
    for budgets in ([1, 1, 4], [2, 2, 4], [2, 3, 4]):
        instance = instance_of([1, 1, 1, 1], budgets)
        found = sca(instance)
        assert instance.broken(found.masks) is None
        assert found.iterations > 0
        best = optimal([1, 1, 1, 1], budgets)
        assert value(instance, found.masks, "J") >= best.J - 1e-9


def test_the_best_iterate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cvxpy", reason="the extra parsifl[sca] is not installed")
    instance = instance_of([1, 1, 1, 1], [1, 3, 4])
    best = np.array([[0, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=np.bool_)
    worse = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], dtype=np.bool_)
    share = np.zeros((3, 4))
    path = iter([(best.astype(float), share), (worse.astype(float), share), None])
    monkeypatch.setattr("parsifl.masks.sca._start", lambda *_: worse)
    monkeypatch.setattr("parsifl.masks.sca._Model.solve", lambda *_: next(path))
    assert np.array_equal(sca(instance).masks, best)


def test_the_result_is_never_worse_than_the_start() -> None:
    pytest.importorskip("cvxpy", reason="the extra parsifl[sca] is not installed")
    for budgets in ([1, 3, 4], [2, 3, 4]):
        instance = instance_of([1, 1, 1, 1], budgets)
        start = _start(instance, Key(0, purpose="sca"))
        assert value(instance, sca(instance).masks, "J") <= value(instance, start, "J")
