"""Fits by site, Q, random effects, and the test of site intercepts, against statsmodels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.regimes import Regime

from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    load,
    save,
)

sm = pytest.importorskip("statsmodels.api")
meta = pytest.importorskip("statsmodels.stats.meta_analysis")

KEEP = [1, 4, 6]
OURS: dict[str, Any] = {
    "gaussian": FederatedSparseRegressor,
    "binomial": FederatedSparseClassifier,
    "poisson": FederatedSparsePoisson,
}


def _sites(family: str, **more: Any) -> Any:
    more = {"intercepts": 1.0, "noise": (0.5, 1.0, 2.0), **more}
    regime = Regime(family, sizes=(80, 60, 100), features=8, nonzero=3, strength=0.5, **more)
    sites = regime.draw(1)
    sites.x[:] = 3 * sites.x + np.arange(8) + 2 * sites.groups[:, None]
    return sites


def _pooled(family: str, y: Any, x: Any) -> Any:
    if family == "gaussian":
        return sm.OLS(y, x).fit()
    kind = {"binomial": sm.families.Binomial, "poisson": sm.families.Poisson}[family]()
    return sm.GLM(y, x, family=kind).fit(tol=1e-15, maxiter=200)


@pytest.mark.parametrize("center", ["global", "client"])
@pytest.mark.parametrize("family", OURS)
def test_estimates_by_site_are_those_of_the_rows_of_the_site(family: str, center: str) -> None:
    sites = _sites(family)
    model = OURS[family](0, keep=KEEP, center=center).fit(sites.x, sites.y, groups=sites.groups)
    summary = model.summary()
    slopes = summary.names.index("x1")
    for site in range(3):
        rows = sites.groups == site
        oracle = _pooled(family, sites.y[rows], sm.add_constant(sites.x[rows][:, KEEP]))
        first = 1 - slopes
        ours, errors = summary.site_estimates[site], summary.site_se[site]
        np.testing.assert_allclose(ours, oracle.params[first:], rtol=1e-6)
        np.testing.assert_allclose(errors, oracle.bse[first:], rtol=1e-6)


def test_estimates_of_cox_by_site_are_those_of_the_rows_of_the_site() -> None:
    sites = _sites("cox")
    model = FederatedSparseCox(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    summary = model.summary()
    for site in range(3):
        rows = sites.groups == site
        oracle = sm.PHReg(sites.y[rows, 0], sites.x[rows][:, KEEP], status=sites.y[rows, 1])
        b = summary.site_estimates[site]
        assert np.abs(oracle.score(b)).max() < 1e-7
        errors = np.sqrt(np.diag(np.linalg.inv(-oracle.hessian(b))))
        np.testing.assert_allclose(summary.site_se[site], errors, rtol=1e-6)


def test_a_csr_matrix_and_no_intercept_have_site_estimates_too() -> None:
    import scipy.sparse as sp

    sites = _sites("gaussian", shift=0.0)
    x = sites.x * (np.abs(sites.x) > 3)
    for given in (sp.csr_matrix(x), x):
        fitted = FederatedSparseRegressor(0, keep=KEEP).fit(given, sites.y, groups=sites.groups)
        oracle = sm.OLS(sites.y[:80], sm.add_constant(x[:80][:, KEEP])).fit()
        np.testing.assert_allclose(fitted.summary().site_estimates[0], oracle.params, rtol=1e-6)
    without = FederatedSparseRegressor(0, keep=KEEP, fit_intercept=False)
    oracle = sm.OLS(sites.y[:80], x[:80][:, KEEP]).fit()
    summary = without.fit(x, sites.y, groups=sites.groups).summary()
    np.testing.assert_allclose(summary.site_estimates[0], oracle.params, rtol=1e-6)
    np.testing.assert_allclose(summary.site_se[0], oracle.bse, rtol=1e-6)


@pytest.mark.parametrize("family", OURS)
def test_q_and_random_effects_equal_the_two_stage_analysis(family: str) -> None:
    sites = _sites(family, intercepts=2.0)
    sites.x[:] -= 2 * sites.groups[:, None]  # so that intercepts differ
    model = OURS[family](0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    summary = model.summary()
    compared = 0
    for i in range(4):
        ours, variance = summary.site_estimates[:, i], summary.site_se[:, i] ** 2
        with np.errstate(invalid="ignore"):  # statsmodels does not truncate tau2 at 0
            oracle = meta.combine_effects(ours, variance, method_re="chi2", use_t=True)
        assert summary.q[i] == pytest.approx(oracle.q, rel=1e-9)
        assert summary.i2[i] == pytest.approx(max(oracle.i2, 0), abs=1e-9)
        assert summary.tau2[i] == pytest.approx(max(oracle.tau2, 0), rel=1e-9, abs=1e-12)
        if oracle.tau2 < 0:
            continue
        compared += 1
        assert summary.random_estimate[i] == pytest.approx(oracle.mean_effect_re, rel=1e-9)
        assert summary.random_se[i] == pytest.approx(oracle.sd_eff_w_re_hksj, rel=1e-9)
        low, high = oracle.conf_int()[3]  # Hartung and Knapp's, with t(2)
        assert (summary.random_lower[i], summary.random_upper[i]) == pytest.approx((low, high))
    assert compared


def test_sites_that_differ_in_level_alone_have_no_heterogeneous_slopes() -> None:
    draw = np.random.default_rng(0)
    groups = np.arange(500) % 5
    x = draw.standard_normal((500, 4)) + groups[:, None]
    y = x @ [0.5, 0.2, 0.0, -0.2] + 3 * groups + draw.standard_normal(500)
    summary = FederatedSparseRegressor(0, keep=range(4)).fit(x, y, groups=groups).summary()
    assert (summary.q[1:] < 13).all()  # chi2(4) is below 13.3 with probability .99
    assert (np.abs(summary.site_estimates[:, 4] + 0.2) < 0.5).all()
    moved = y + np.where(groups == 0, 2.0, 0.0) * x[:, 1]
    other = FederatedSparseRegressor(0, keep=range(4)).fit(x, moved, groups=groups).summary()
    assert other.i2[2] > 0.9


@pytest.mark.parametrize("family", OURS)
def test_site_effects_are_tested_as_in_statsmodels(family: str) -> None:
    sites = _sites(family, intercepts=0.3)
    model = OURS[family](0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    effects = model.summary().site_effects
    assert effects is not None
    design, dummies = sm.add_constant(sites.x[:, KEEP]), np.eye(3)[sites.groups][:, 1:]
    if family == "gaussian":
        larger = sm.OLS(sites.y, np.c_[design, dummies]).fit()
        statistic, pvalue, _ = larger.compare_f_test(sm.OLS(sites.y, design).fit())
    else:
        statistic, pvalue = _pooled(family, sites.y, design).score_test(exog_extra=dummies)[:2]
    assert effects.statistic == pytest.approx(float(np.squeeze(statistic)), rel=1e-6)
    assert effects.pvalue == pytest.approx(float(np.squeeze(pvalue)), rel=1e-5)


def test_the_summary_says_what_site_effects_do_to_intervals() -> None:
    sites = _sites("gaussian", intercepts=3.0)
    common = FederatedSparseRegressor(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    assert "Sites differ in level: F(2, 234)" in str(common.summary())
    own = FederatedSparseRegressor(0, keep=KEEP, center="client")
    summary = own.fit(sites.x, sites.y, groups=sites.groups).summary()
    assert summary.site_effects is None
    assert "differ in level" not in str(summary)


def test_a_column_that_is_constant_at_a_site_has_no_estimate_there() -> None:
    sites = _sites("gaussian")
    sites.x[sites.groups == 1, 4] = 2.0
    model = FederatedSparseRegressor(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    summary = model.summary()
    assert np.isnan(summary.site_estimates[1, 2])
    oracle = sm.OLS(sites.y[80:140], sm.add_constant(sites.x[80:140][:, [1, 6]])).fit()
    np.testing.assert_allclose(summary.site_estimates[1, [1, 3]], oracle.params[1:], rtol=1e-6)
    assert np.isfinite(summary.q).all()


def test_a_site_of_one_class_has_no_estimate() -> None:
    sites = _sites("binomial")
    y = np.where(sites.groups == 0, 0, sites.y)
    model = FederatedSparseClassifier(0, keep=KEEP).fit(sites.x, y, groups=sites.groups)
    summary = model.summary()
    assert np.isnan(summary.site_estimates[0]).all()
    assert np.isfinite(summary.site_estimates[1:]).all()


def test_a_saved_estimator_keeps_the_estimates_of_sites(tmp_path: Any) -> None:
    sites = _sites("binomial")
    model = FederatedSparseClassifier(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    save(model, tmp_path / "model.json")
    again = load(tmp_path / "model.json").summary()
    np.testing.assert_array_equal(again.site_se, model.summary().site_se)
    assert model.summary_bytes_ > 0
