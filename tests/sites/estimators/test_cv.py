"""Cross-validation over sites, for every family."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold
from sklearn.utils.estimator_checks import check_estimator
from tests.sites.estimators.test_frames import SITE, frame, risk

from parsifl.core.errors import ConfigError
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseClassifierCV,
    FederatedSparseCoxCV,
    FederatedSparsePoissonCV,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
)

KINDS: list[Any] = [
    FederatedSparseRegressorCV,
    FederatedSparseClassifierCV,
    FederatedSparsePoissonCV,
    FederatedSparseCoxCV,
]


def data(kind: Any, rows: int = 400) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(3)
    x = draw.normal(size=(rows, 8))
    u = 0.8 * x[:, 2] - 0.7 * x[:, 5]
    groups = np.repeat([0, 1, 2, 3, 4], [40, 60, 80, 100, 120])
    if kind is FederatedSparseRegressorCV:
        return x, u + 0.5 * draw.normal(size=rows), groups
    if kind is FederatedSparseClassifierCV:
        return x, np.where(draw.random(rows) < 1 / (1 + np.exp(-2 * u)), "ill", "well"), groups
    if kind is FederatedSparsePoissonCV:
        return x, draw.poisson(np.exp(u)), groups
    time = draw.exponential(np.exp(-u))
    return x, np.stack([np.minimum(time, 1.5), time < 1.5], axis=1), groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "estimator"),
    [
        (FederatedSparseClassifierCV, FederatedSparseClassifier(rounds=8)),  # softmax takes long
        (FederatedSparsePoissonCV, None),
        (FederatedSparseCoxCV, None),
    ],
)
def test_scikit_learn_s_own_checks(kind: Any, estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(kind([1], cv=2, estimator=estimator), on_fail=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_number_is_chosen_for_every_family(kind: Any) -> None:
    x, y, groups = data(kind)
    model = kind(path=[1, 2, 4, 6], cv=5, rule="one-se").fit(x, y, groups)
    assert model.n_nonzero_coefs_ == 2
    assert model.support_.tolist() == [2, 5]
    assert model.error_path_.shape == (4, 5)
    assert model.mean_error_.shape == model.standard_error_.shape == (4,)
    assert np.array_equal(model.predict(x), model.best_estimator_.predict(x))
    assert model.score(x, y) > 0.3


def test_rules_and_scorings_are_named() -> None:
    x, y, groups = data(FederatedSparseClassifierCV)
    auc = FederatedSparseClassifierCV(path=[1, 2], scoring="auc").fit(x, y, groups)
    assert (auc.error_path_ < 0.4).all()
    assert auc.predict_proba(x).shape == (400, 2)
    with pytest.raises(ConfigError, match="scoring"):
        FederatedSparseClassifierCV(scoring="mse").fit(x, y, groups)
    with pytest.raises(ConfigError, match="rule"):
        FederatedSparseClassifierCV(rule="two-se").fit(x, y, groups)


@pytest.mark.parametrize("settings", [{}, {"l2": 0.1}, {"keep": [1]}, {"standardize": False}])
def test_the_path_follows_from_sums_that_are_sent_once(settings: dict[str, Any]) -> None:
    x, y, groups = data(FederatedSparseRegressorCV)
    x = x * np.arange(1, 9) + 1000.0
    weight = np.random.default_rng(0).uniform(0.5, 2.0, len(y))
    folds = list(GroupKFold(5).split(x, groups=groups))
    base = FederatedSparseRegressor(**settings)
    fast = FederatedSparseRegressorCV(path=[1, 2, 4], cv=folds, estimator=base)
    fast.fit(x, y, groups, sample_weight=weight)
    assert fast.bytes_up_ == fast.best_estimator_.bytes_up_
    slow = np.empty((3, 5))
    for j, (train, held) in enumerate(folds):
        for i, number in enumerate((1, 2, 4)):
            model = FederatedSparseRegressor(number, **settings)
            model.fit(x[train], y[train], groups[train], sample_weight=weight[train])
            errors = (model.predict(x[held]) - y[held]) ** 2
            slow[i, j] = np.average(errors, weights=weight[held])
    assert np.allclose(fast.error_path_, slow, rtol=1e-8)


def test_tables_are_cross_validated() -> None:
    found = FederatedSparseRegressorCV(path=[1, 2, 3], cv=3).fit(frame(), risk(frame()), SITE)
    assert found.n_nonzero_coefs_ >= 2
    assert "ward=surgery" in found.get_feature_names_out()
    assert found.predict(frame()).shape == (300,)
