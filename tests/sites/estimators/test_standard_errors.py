"""Weights and robust errors against statsmodels, lifelines and written references."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.support.regimes import Regime

from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    post_double_selection,
    split_inference,
)

sm = pytest.importorskip("statsmodels.api")
pd = pytest.importorskip("pandas")

KEEP = [1, 4, 6]
OURS: dict[str, Any] = {
    "gaussian": FederatedSparseRegressor,
    "binomial": FederatedSparseClassifier,
    "poisson": FederatedSparsePoisson,
}


def _sites(family: str) -> Any:
    regime = Regime(family, sizes=(40,) * 8, features=8, nonzero=3, strength=0.5, intercepts=0.3)
    sites = regime.draw(1)
    sites.x[:] = 3 * sites.x + np.arange(8)
    return sites


def _family(family: str) -> Any:
    names = {"gaussian": "Gaussian", "binomial": "Binomial", "poisson": "Poisson"}
    return getattr(sm.families, names[family])()


def _glm(family: str, y: Any, x: Any, *, weights: Any = None, **fit: Any) -> Any:
    more = {} if weights is None else weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels warns about combinations of its arguments
        model = sm.GLM(y, x, family=_family(family), **more)
        return model.fit(tol=1e-15, maxiter=200, **fit)


def _fitted(family: str, sites: Any, weight: Any = None, **settings: Any) -> Any:
    model = OURS[family](0, keep=KEEP, **settings)
    return model.fit(sites.x, sites.y, groups=sites.groups, sample_weight=weight)


@pytest.mark.parametrize("family", OURS)
def test_frequency_weights_equal_repeated_rows(family: str) -> None:
    sites = _sites(family)
    weight = np.random.default_rng(0).integers(1, 5, len(sites.y))
    model = _fitted(family, sites, weight, weight_type="frequency")
    rows = np.repeat(np.arange(len(weight)), weight)
    again = OURS[family](0, keep=KEEP)
    again.fit(sites.x[rows], sites.y[rows], groups=sites.groups[rows])
    ours, repeated = model.summary(), again.summary()
    np.testing.assert_allclose(ours.se, repeated.se, rtol=1e-6)
    np.testing.assert_allclose(ours.site_se, repeated.site_se, rtol=1e-6)
    np.testing.assert_allclose(ours.pvalue, repeated.pvalue, rtol=1e-6, atol=1e-12)
    criteria = again.information_criteria()
    assert model.information_criteria() == pytest.approx(criteria, rel=1e-9)
    design = sm.add_constant(sites.x[:, KEEP])
    oracle = _glm(family, sites.y, design, weights={"freq_weights": weight})
    np.testing.assert_allclose(ours.se, oracle.bse, rtol=1e-6)


@pytest.mark.parametrize("family", OURS)
def test_precision_weights_are_those_of_statsmodels(family: str) -> None:
    sites = _sites(family)
    weight = np.random.default_rng(0).uniform(0.5, 6.0, len(sites.y))
    model = _fitted(family, sites, weight, weight_type="precision")
    design = sm.add_constant(sites.x[:, KEEP])
    summary = model.summary()
    if family == "gaussian":
        oracle = sm.WLS(sites.y, design, weights=weight).fit()
        assert model.information_criteria()["log_likelihood"] == pytest.approx(oracle.llf)
    else:
        oracle = _glm(family, sites.y, design, weights={"var_weights": weight})
    np.testing.assert_allclose(summary.estimate, oracle.params, rtol=1e-7)
    np.testing.assert_allclose(summary.se, oracle.bse, rtol=1e-6)


@pytest.mark.parametrize("family", OURS)
def test_sampling_weights_have_robust_errors_by_default(family: str) -> None:
    sites = _sites(family)
    weight = np.random.default_rng(0).uniform(0.5, 6.0, len(sites.y))
    summary = _fitted(family, sites, weight).summary()
    design = sm.add_constant(sites.x[:, KEEP])
    n, p = design.shape
    if family == "gaussian":
        oracle = sm.WLS(sites.y, design, weights=weight).fit(cov_type="HC1")
        expected = oracle.bse
    else:
        oracle = _glm(family, sites.y, design, weights={"var_weights": weight}, cov_type="HC0")
        expected = oracle.bse * np.sqrt(n / (n - p))
    np.testing.assert_allclose(summary.se, expected, rtol=1e-6)
    assert "robust (HC1)" in summary.guarantee
    scaled = _fitted(family, sites, 10 * weight).summary()
    np.testing.assert_allclose(scaled.se, summary.se, rtol=1e-9)


@pytest.mark.parametrize("center", ["global", "client"])
@pytest.mark.parametrize("family", OURS)
def test_robust_errors_are_those_of_statsmodels(family: str, center: str) -> None:
    sites = _sites(family)
    model = _fitted(family, sites, center=center)
    design = sm.add_constant(sites.x[:, KEEP])
    take = slice(0, 4)
    if center == "client":
        design, take = np.c_[sites.x[:, KEEP], np.eye(8)[sites.groups]], slice(0, 3)
    n, p = design.shape
    factor = np.sqrt(n / (n - p))
    if family == "gaussian":
        oracle = sm.OLS(sites.y, design).fit(cov_type="HC0")
    else:
        oracle = _glm(family, sites.y, design, cov_type="HC0")
    np.testing.assert_allclose(model.summary(se="HC0").se, oracle.bse[take], rtol=1e-6)
    np.testing.assert_allclose(model.summary(se="robust").se, factor * oracle.bse[take], rtol=1e-6)
    by_site = {"cov_type": "cluster", "cov_kwds": {"groups": sites.groups}}
    if family == "gaussian":
        oracle = sm.OLS(sites.y, design).fit(**by_site)
    else:
        oracle = _glm(family, sites.y, design, **by_site)
    with pytest.warns(ParsiflWarning, match="with 8 sites"):
        summary = model.summary(se="cluster")
    np.testing.assert_allclose(summary.se, oracle.bse[take], rtol=1e-6)
    half = stats.t(7).ppf(0.975) * summary.se
    np.testing.assert_allclose(summary.upper - summary.estimate, half, rtol=1e-9)


@pytest.mark.parametrize("family", OURS)
def test_pearson_s_dispersion_scales_the_errors(family: str) -> None:
    sites = _sites(family)
    oracle = _glm(family, sites.y, sm.add_constant(sites.x[:, KEEP]), scale="X2")
    summary = _fitted(family, sites).summary(se="dispersion")
    np.testing.assert_allclose(summary.se, oracle.bse, rtol=1e-6)
    assert f"{oracle.scale:.3g}" in summary.guarantee


def test_robust_errors_of_cox_are_those_of_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    sites = _sites("cox")
    draw = np.random.default_rng(0)
    time = sites.y[:, 0] + draw.random(len(sites.y)) * 1e-3  # without ties
    weight = draw.uniform(0.5, 3.0, len(time))
    y = np.stack([time, sites.y[:, 1]], axis=1)
    frame = pd.DataFrame(np.c_[sites.x[:, KEEP], y, weight], columns=[*"abc", "t", "e", "w"])
    frame["site"] = sites.groups
    oracle = lifelines.CoxPHFitter()
    options = {"strata": "site", "weights_col": "w", "robust": True}
    oracle.fit(frame, "t", "e", fit_options={"precision": 1e-14}, **options)
    model = FederatedSparseCox(0, keep=KEEP)
    summary = model.fit(sites.x, y, groups=sites.groups, sample_weight=weight).summary()
    np.testing.assert_allclose(summary.estimate, oracle.params_, rtol=1e-6)
    np.testing.assert_allclose(summary.se, oracle.standard_errors_, rtol=1e-5)
    with pytest.raises(ConfigError, match="not defined for Cox"):
        model.summary(se="dispersion")


def test_settings_of_errors_and_weights_are_checked() -> None:
    sites = _sites("gaussian")
    unknown: Any = "HC9"
    with pytest.raises(ConfigError, match="unknown se"):
        _fitted("gaussian", sites).summary(se=unknown)
    with pytest.raises(ConfigError, match="unknown weight_type"):
        _fitted("gaussian", sites, weight_type="importance")
    with pytest.raises(ValueError, match="needs whole numbers"):
        _fitted("gaussian", sites, np.full(320, 1.5), weight_type="frequency")
    counted = _fitted("gaussian", sites, np.full(320, 2), weight_type="frequency")
    with pytest.raises(ConfigError, match="repeat the rows"):
        counted.summary(se="robust")


def test_equal_sites_variances_keep_the_errors_of_a_model() -> None:
    sites = _sites("gaussian")
    summary = _fitted("gaussian", sites, site_variances=True).summary()
    assert "observed information" in summary.guarantee


def test_cross_validation_without_weights_has_no_sampling_weights() -> None:
    sites = _sites("gaussian")
    path = FederatedSparseRegressorCV(path=[8], cv=4).fit(sites.x, sites.y, groups=sites.groups)
    assert "observed information" in path.best_estimator_.summary().guarantee


def test_a_ridge_says_what_its_intervals_cover() -> None:
    sites = _sites("gaussian")
    summary = _fitted("gaussian", sites, l2=0.3).summary()
    assert "ridge penalty (l2) shrinks" in summary.guarantee
    assert "ridge" not in _fitted("gaussian", sites).summary().guarantee


def test_double_selection_has_robust_errors_and_no_ridge() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((300, 12))
    x[:, 0] += x[:, 1]
    y = 0.5 * x[:, 0] + x[:, 1] + (0.2 + np.abs(x[:, 0])) * draw.standard_normal(300)
    sites = np.arange(300) % 3
    given = FederatedSparseRegressor(1, l2=0.5)
    summary = post_double_selection(given, x, y, sites, exposure=0)
    oracle = sm.OLS(y, sm.add_constant(x[:, :2])).fit(cov_type="HC1")
    assert summary.estimate[0] == pytest.approx(oracle.params[1], rel=1e-7)
    assert summary.se[0] == pytest.approx(oracle.bse[1], rel=1e-6)
    assert summary.tau2.shape == (1,)
    model = post_double_selection(given, x, y, sites, exposure=0, se="model")
    assert model.se[0] < 0.8 * summary.se[0]


def test_split_inference_estimates_without_the_ridge() -> None:
    sites = _sites("gaussian")
    given = FederatedSparseRegressor(3, l2=5.0)
    summary = split_inference(given, sites.x, sites.y, sites.groups)
    plain = split_inference(FederatedSparseRegressor(3), sites.x, sites.y, sites.groups)
    assert "ridge" not in str(summary)
    shared = [name for name in summary.names if name in plain.names]
    assert len(shared) > 1
    if summary.names == plain.names:
        np.testing.assert_allclose(summary.estimate, plain.estimate)


@pytest.mark.parametrize("family", ["gaussian", "binomial"])
def test_errors_that_need_further_sums_say_so_after_a_deployment(family: str) -> None:
    sites = _sites(family)
    model = _fitted(family, sites)
    before = model.summary().se
    model._exact = replace(model._exact, by_site=None)  # as the sites of a deployment answer
    np.testing.assert_allclose(model.summary().se, before, rtol=1e-9)
    for kind in ("robust", "HC0", "dispersion"):
        with pytest.raises(ConfigError, match="sites of a deployment do not send"):
            model.summary(se=kind)
    if family == "binomial":  # the gradients of sites suffice
        with pytest.warns(ParsiflWarning, match="with 8 sites"):
            assert np.isfinite(model.summary(se="cluster").se).all()
