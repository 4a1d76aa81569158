"""Factors with many levels: warnings that name their degrees of freedom, and criteria."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import ParsiflWarning
from parsifl.sites import FederatedSparseClassifier, FederatedSparseRegressor

pd = pytest.importorskip("pandas")
sm = pytest.importorskip("statsmodels.api")


def _table(seed: int, levels: int = 20) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "marker": draw.standard_normal(500),
            "ward": [f"w{level}" for level in draw.integers(0, levels, 500)],
        }
    )
    y = 0.15 * table.marker.to_numpy() + draw.standard_normal(500)  # z = 3.3
    return table, y, np.arange(500) % 4


@pytest.mark.parametrize("family", ["gaussian", "binomial"])
def test_a_noise_factor_does_not_win_unseen(family: str) -> None:
    kind: Any = FederatedSparseRegressor if family == "gaussian" else FederatedSparseClassifier
    won = 0
    for seed in range(10):
        table, y, groups = _table(seed)
        target = y if family == "gaussian" else y > 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = kind(1).fit(table, target, groups=groups)
        text = " ".join(str(entry.message) for entry in caught)
        wrong = model.selected() == ["ward"]
        won += wrong
        assert ("the selected term 'ward' has 19 coefficients" in text) is wrong
    assert won > 5


def test_a_factor_that_matters_gives_no_warning() -> None:
    table, y, groups = _table(0, levels=4)
    y = y + 2.0 * (table.ward == "w1")
    assert FederatedSparseRegressor(1).fit(table, y, groups=groups).selected() == ["ward"]


def test_the_gain_of_a_factor_is_that_of_the_pooled_fit() -> None:
    from parsifl.sites.standard_errors import removals

    table, y, groups = _table(0, levels=4)
    y = y + 2.0 * (table.ward == "w1")
    model = FederatedSparseRegressor(2).fit(table, y, groups=groups)
    assert model._exact is not None
    rises = {size: rise for _, size, rise in removals(model._exact, "gaussian")}
    dummies = pd.get_dummies(table.ward, drop_first=True).astype(float)
    larger = sm.OLS(y, sm.add_constant(pd.concat([table[["marker"]], dummies], axis=1))).fit()
    smaller = sm.OLS(y, sm.add_constant(table[["marker"]])).fit()
    assert rises[3] == pytest.approx((smaller.ssr - larger.ssr) / larger.scale, rel=1e-8)


def test_criteria_count_the_coefficients_of_a_factor() -> None:
    table, y, groups = _table(0, levels=4)
    y = y + 2.0 * (table.ward == "w1")
    model = FederatedSparseRegressor(1).fit(table, y, groups=groups)
    dummies = pd.get_dummies(table.ward, drop_first=True).astype(float)
    oracle = sm.OLS(y, sm.add_constant(dummies)).fit()
    criteria = model.information_criteria()
    assert criteria["bic"] == pytest.approx(oracle.bic, rel=1e-9)
    n = np.log(np.log(500)) * np.log(2)
    assert criteria["gic"] == pytest.approx(-2 * oracle.llf + 3 * n, rel=1e-9)


def test_columns_like_identifiers_are_named() -> None:
    table, y, groups = _table(0, levels=3)
    table["patient"] = [f"p{row // 2}" for row in range(500)]
    fixed = FederatedSparseRegressor(0, keep=["marker"])
    with pytest.warns(ParsiflWarning, match="'patient' has 250 levels in 500 rows"):
        fixed.fit(table, y, groups=groups)
