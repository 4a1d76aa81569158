"""Standard errors against statsmodels, coverage by simulation, and what is not said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.regimes import Regime

from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    post_double_selection,
    split_inference,
)

sm = pytest.importorskip("statsmodels.api")
pd = pytest.importorskip("pandas")

KEEP = [1, 4, 6]
FAMILIES = {
    "gaussian": (FederatedSparseRegressor, "Gaussian"),
    "binomial": (FederatedSparseClassifier, "Binomial"),
    "poisson": (FederatedSparsePoisson, "Poisson"),
}


def _sites(family: str, **more: Any) -> Any:
    regime = Regime(family, sizes=(80, 60, 100), features=8, nonzero=3, strength=0.5, **more)
    sites = regime.draw(1)
    sites.x[:] = 3 * sites.x + np.arange(8)  # other units, and means that are not zero
    return sites


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fixed_model_has_the_standard_errors_of_statsmodels(family: str) -> None:
    kind: Any
    kind, oracle = FAMILIES[family]
    sites = _sites(family)
    design = sm.add_constant(sites.x[:, KEEP])
    if family == "gaussian":
        pooled = sm.OLS(sites.y, design).fit()
    else:
        family_ = getattr(sm.families, oracle)()
        pooled = sm.GLM(sites.y, design, family=family_).fit(tol=1e-15, maxiter=200)
    model = kind(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    found = model.summary()
    assert found.names == ["(intercept)", "x1", "x4", "x6"]
    np.testing.assert_allclose(found.estimate, pooled.params, rtol=1e-8)
    np.testing.assert_allclose(found.se, pooled.bse, rtol=1e-6)
    interval = pooled.conf_int()
    np.testing.assert_allclose(found.lower, interval[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.upper, interval[:, 1], rtol=1e-6)
    np.testing.assert_allclose(found.pvalue, pooled.pvalues, rtol=1e-4, atol=1e-12)
    assert "fixed in advance" in found.guarantee
    criteria = model.information_criteria()
    assert criteria["log_likelihood"] == pytest.approx(pooled.llf, rel=1e-9)
    assert criteria["aic"] == pytest.approx(pooled.aic, rel=1e-9)
    bic = pooled.bic if family == "gaussian" else pooled.bic_llf
    assert criteria["bic"] == pytest.approx(bic, rel=1e-9)


def test_stratified_cox_has_the_standard_errors_of_statsmodels() -> None:
    sites = _sites("cox")
    oracle = sm.PHReg(
        sites.y[:, 0], sites.x[:, KEEP], status=sites.y[:, 1], strata=sites.groups, ties="breslow"
    )
    pooled = oracle.fit(method="bfgs", gtol=1e-12, disp=0)
    start = np.asarray(pooled.params)
    for _ in range(5):  # statsmodels stops early: a few Newton steps of its own
        start = start - np.linalg.solve(oracle.hessian(start), oracle.score(start))
    model = FederatedSparseCox(0, keep=KEEP).fit(sites.x, sites.y, groups=sites.groups)
    found = model.summary()
    np.testing.assert_allclose(found.estimate, start, rtol=1e-8)
    errors = np.sqrt(np.diag(np.linalg.inv(-oracle.hessian(start))))
    np.testing.assert_allclose(found.se, errors, rtol=1e-6)
    likelihood = model.information_criteria()["log_likelihood"]
    assert oracle.loglike(start) == pytest.approx(likelihood, rel=1e-10)
    assert 0.5 < model.score(sites.x, sites.y) < 1
    assert 0.5 < model.score(sites.x, sites.y, groups=sites.groups) < 1


def test_cox_without_ties_equals_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    sites = _sites("cox")
    time = sites.y[:, 0] + np.random.default_rng(0).random(len(sites.y)) * 1e-3
    y = np.stack([time, sites.y[:, 1]], axis=1)
    frame = pd.DataFrame(np.c_[sites.x[:, KEEP], y], columns=[*"abc", "time", "event"])
    frame["site"] = sites.groups
    pooled = lifelines.CoxPHFitter()
    pooled.fit(frame, "time", "event", strata="site", fit_options={"precision": 1e-12})
    found = FederatedSparseCox(0, keep=KEEP).fit(sites.x, y, groups=sites.groups).summary()
    np.testing.assert_allclose(found.estimate, pooled.params_, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.se, pooled.standard_errors_, rtol=1e-5)
    seen = np.array([(bool(e), t) for t, e in y], dtype=[("event", bool), ("time", float)])
    again = FederatedSparseCox(0, keep=KEEP).fit(sites.x, seen, groups=sites.groups)
    np.testing.assert_array_equal(again.summary().estimate, found.estimate)


def test_efron_s_ties_equal_statsmodels_and_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    sites = _sites("cox")
    time = np.minimum(np.ceil(sites.y[:, 0] / 4), 12)
    assert len(np.unique(time)) == 12
    y = np.stack([time, sites.y[:, 1]], axis=1)
    oracle = sm.PHReg(time, sites.x[:, KEEP], status=y[:, 1], strata=sites.groups, ties="efron")
    b = np.zeros(3)
    for _ in range(20):
        b = b - np.linalg.solve(oracle.hessian(b), oracle.score(b))
    model = FederatedSparseCox(0, keep=KEEP, ties="efron").fit(sites.x, y, groups=sites.groups)
    summary = model.summary()
    np.testing.assert_allclose(summary.estimate, b, rtol=1e-8)
    errors = np.sqrt(np.diag(np.linalg.inv(-oracle.hessian(b))))
    np.testing.assert_allclose(summary.se, errors, rtol=1e-8)
    assert model.information_criteria()["log_likelihood"] == pytest.approx(oracle.loglike(b))
    frame = pd.DataFrame(np.c_[sites.x[:, KEEP], y], columns=[*"abc", "time", "event"])
    frame["site"] = sites.groups
    theirs = lifelines.CoxPHFitter()
    theirs.fit(frame, "time", "event", strata="site", fit_options={"precision": 1e-14})
    np.testing.assert_allclose(summary.estimate, theirs.params_, rtol=1e-6)
    assert "Efron's ties" in model.methods_text()
    with pytest.warns(ParsiflWarning, match="Set ties='efron'"):
        FederatedSparseCox(0, keep=KEEP).fit(sites.x, y, groups=sites.groups)
    unknown: Any = "exact"
    with pytest.raises(ConfigError, match="ties must be"):
        FederatedSparseCox(0, keep=KEEP, ties=unknown).fit(sites.x, y, groups=sites.groups)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offset", [0.0, 32.0])
def test_columns_that_depend_on_each_other_have_no_standard_errors(
    family: str, offset: float
) -> None:
    kind: Any
    kind, _ = FAMILIES[family]
    sites = _sites(family)
    sites.x[:, 2] = 1.8 * sites.x[:, 1] + offset  # one measurement in two units
    with pytest.warns(ParsiflWarning, match="columns x1, x2 of the model depend linearly"):
        model = kind(0, keep=[1, 2, 4]).fit(sites.x, sites.y, groups=sites.groups)
    found = model.summary()
    known = ["x4"] if offset else ["(intercept)", "x4"]
    given = [name for name, error in zip(found.names, found.se, strict=True) if error == error]
    assert given == known
    alone = kind(0, keep=[1, 4]).fit(sites.x, sites.y, groups=sites.groups).summary()
    np.testing.assert_allclose(found.se[3], alone.se[2], rtol=1e-2)
    assert "The rows do not determine" in found.guarantee
    ridge = kind(0, keep=[1, 2, 4], l2=0.1).fit(sites.x, sites.y, groups=sites.groups).summary()
    assert np.isfinite(ridge.se).all()


def test_own_intercepts_take_degrees_of_freedom() -> None:
    sites = _sites("gaussian", intercepts=2.0)
    dummies = np.eye(3)[sites.groups]
    pooled = sm.OLS(sites.y, np.c_[sites.x[:, KEEP], dummies]).fit()
    model = FederatedSparseRegressor(0, keep=KEEP, center="client")
    found = model.fit(sites.x, sites.y, groups=sites.groups).summary()
    assert found.names == ["x1", "x4", "x6"]
    np.testing.assert_allclose(found.estimate, pooled.params[:3], rtol=1e-8)
    np.testing.assert_allclose(found.se, pooled.bse[:3], rtol=1e-6)


def test_after_selection_no_errors_are_given() -> None:
    sites = _sites("gaussian")
    model = FederatedSparseRegressor(3).fit(sites.x, sites.y, groups=sites.groups)
    found = model.summary()
    assert np.isnan(found.se).all()
    assert np.isnan(found.pvalue).all()
    assert "split_inference" in found.guarantee
    everything = FederatedSparseRegressor(8).fit(sites.x, sites.y).summary()
    assert np.isfinite(everything.se).all()
    other = FederatedSparseRegressor(3, solver="fedgradmp")
    other.fit(sites.x, sites.y, groups=sites.groups)
    with pytest.raises(ValueError, match="needs solver='exact'"):
        other.summary()
    with pytest.raises(ValueError, match="level"):
        model.summary(level=95)


def test_names_of_a_frame_are_kept() -> None:
    sites = _sites("gaussian")
    frame = pd.DataFrame(sites.x, columns=[f"lab {i}" for i in range(8)])
    model = FederatedSparseRegressor(0, keep=[2]).fit(frame, sites.y)
    assert model.summary().names == ["(intercept)", "lab 2"]
    split = split_inference(FederatedSparseRegressor(1), frame, sites.y, sites.groups)
    assert split.names[1].startswith("lab ")


def _coverage(draws: int) -> tuple[float, float]:
    """Return how often split and naive intervals hold the coefficients of the chosen model."""
    regime = Regime(sizes=(60, 60, 60, 60), features=40, nonzero=5, strength=0.15, rho=0.0)
    covered: list[float] = []
    naive: list[float] = []
    for seed in range(draws):
        sites = regime.draw(seed)
        # columns are independent: the coefficients of a chosen model are those of the truth
        found = split_inference(
            FederatedSparseRegressor(4), sites.x, sites.y, sites.groups, seed=seed
        )
        places = [int(name[1:]) for name in found.names[1:]]
        inside = (found.lower[1:] <= sites.truth[places]) & (sites.truth[places] <= found.upper[1:])
        covered.extend(inside)
        chosen = FederatedSparseRegressor(4).fit(sites.x, sites.y, sites.groups).support_
        fixed = FederatedSparseRegressor(0, keep=chosen.tolist())
        again = fixed.fit(sites.x, sites.y, sites.groups).summary()
        truth = sites.truth[chosen]
        naive.extend((again.lower[1:] <= truth) & (truth <= again.upper[1:]))
    return float(np.mean(covered)), float(np.mean(naive))


def test_split_intervals_cover_and_naive_ones_do_not() -> None:
    split, naive = _coverage(100)
    assert 0.93 <= split <= 0.97
    assert naive < 0.9


def test_double_selection_covers_the_exposure() -> None:
    covered = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        x = draw.standard_normal((200, 30))
        x[:, 0] = 0.8 * x[:, 1] + 0.8 * x[:, 2] + 0.6 * draw.standard_normal(200)
        y = 0.5 * x[:, 0] + 0.25 * x[:, 1] + 0.25 * x[:, 2] + draw.standard_normal(200)
        found = post_double_selection(
            FederatedSparseRegressor(3), x, y, np.arange(200) % 4, exposure=0
        )
        assert found.names == ["x0"]
        covered.append(bool(found.lower[0] <= 0.5 <= found.upper[0]))
    assert 0.9 <= np.mean(covered) <= 0.99
    assert "exposure" in found.guarantee
    with pytest.raises(ValueError, match="Regressor"):
        post_double_selection(FederatedSparseClassifier(2), x, y > 0, exposure=0)


def test_information_criteria_find_the_size_of_the_model() -> None:
    sites = Regime(sizes=(100, 100), features=30, nonzero=4).draw()
    scores = {}
    for count in range(1, 9):
        model = FederatedSparseRegressor(count).fit(sites.x, sites.y, sites.groups)
        scores[count] = model.information_criteria()
    for name in ("ebic", "gic"):
        values = [scores[count][name] for count in scores]
        assert abs(1 + int(np.argmin(values)) - 4) <= 1
