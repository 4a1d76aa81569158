"""Figures of fits: what they show is what the estimators hold."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from lifelines import KaplanMeierFitter
from sklearn.metrics import roc_auc_score
from tests.sites.estimators.test_cv import data
from tests.sites.estimators.test_frames import SITE, frame, risk

from parsifl.core.errors import ConfigError
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseClassifierCV,
    FederatedSparseCox,
    FederatedSparseCoxCV,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    plots,
    stability_selection,
)


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_path_has_a_line_for_every_term() -> None:
    x, y, groups = data(FederatedSparseRegressorCV)
    ax = plots.coefficient_path(FederatedSparseRegressor(), x, y, groups, path=[1, 2, 3])
    assert {"x2", "x5"} <= set(labels(ax))
    line = ax.get_lines()[labels(ax).index("x2")]
    model = FederatedSparseRegressor(3).fit(x, y, groups)
    assert line.get_ydata()[2] == pytest.approx(model.coef_[2] * x[:, 2].std(), rel=1e-6)


def test_the_curve_marks_the_choice() -> None:
    x, y, groups = data(FederatedSparseClassifierCV)
    model = FederatedSparseClassifierCV(path=[1, 2, 4], rule="one-se").fit(x, y, groups)
    ax = plots.cv_curve(model)
    assert "chosen: 2 (one-se)" in labels(ax)
    assert np.allclose(ax.get_lines()[0].get_ydata(), model.mean_error_)


def test_stability_and_forest_name_columns_and_sites() -> None:
    found = stability_selection(
        FederatedSparseRegressor(2), frame(), risk(frame()), SITE, subsamples=4, by="rows"
    )
    ax = plots.stability_plot(found)
    assert [tick.get_text() for tick in ax.get_yticklabels()][-1] in ("age", "ward")
    table = FederatedSparseRegressor(0, keep=["age"]).fit(frame(), risk(frame()), SITE).summary()
    ax = plots.forest_plot(table, "age")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0", "1", "2", "all sites"]
    drawn = ax.get_lines()[0].get_xdata()
    place = table.names.index("age")
    assert drawn[-1] == table.estimate[place]
    assert np.array_equal(drawn[:-1], table.site_estimates[:, place])
    with pytest.raises(ValueError, match="unknown coefficient 'weight'"):
        plots.forest_plot(table, "weight")


def test_calibration_and_roc_are_those_of_the_rows() -> None:
    x, y, groups = data(FederatedSparseClassifierCV)
    model = FederatedSparseClassifier(2).fit(x, y, groups)
    area = roc_auc_score(y == "well", model.predict_proba(x)[:, 1])
    assert labels(plots.roc_plot(model, x, y)) == [f"AUC {area:.3f}"]
    drawn = plots.calibration_plot(model, x, y, bins=4).get_lines()[1]
    assert np.corrcoef(drawn.get_xdata(), drawn.get_ydata())[0, 1] > 0.9


def test_survival_curves_are_kaplan_meier_s() -> None:
    x, y, groups = data(FederatedSparseCoxCV)
    times, share = plots.kaplan_meier(y[:, 0], y[:, 1])
    oracle = KaplanMeierFitter().fit(y[:, 0], y[:, 1]).survival_function_at_times(times)
    assert np.allclose(share, oracle)
    ax = plots.survival_plot(FederatedSparseCox(2).fit(x, y, groups), x, y)
    low, _, high = (line.get_ydata()[-1] for line in ax.get_lines())
    assert low > high


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"parsifl\[plots\]"):
        plots._axes(None)
