"""The lossless solver against pooled software, and whatever hospitals may send it."""

from __future__ import annotations

import itertools
import os
import tracemalloc
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from tests.support.regimes import REGIMES, Regime

from parsifl import data
from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.linear.glm import GLM
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
)
from parsifl.sites.estimators.exact import Sites, certified, exact_fit
from parsifl.sites.search.fedbestsubset import FedBestSubset

abess = pytest.importorskip("abess")
sm = pytest.importorskip("statsmodels.api")

OURS: dict[str, Any] = {
    "gaussian": FederatedSparseRegressor,
    "binomial": FederatedSparseClassifier,
    "poisson": FederatedSparsePoisson,
    "cox": FederatedSparseCox,
}
ABESS: dict[str, Any] = {
    "gaussian": "LinearRegression",
    "binomial": "LogisticRegression",
    "poisson": "PoissonRegression",
    "cox": "CoxPHSurvivalAnalysis",
}
MOST_ROUNDS = 30


def _loss(model: Any) -> float:
    return float(model._exact.losses.sum())


def _no_worse_than_abess(family: str, x: Any, y: Any, groups: Any, count: int) -> Any:
    model = OURS[family](count).fit(x, y, groups=groups)
    assert model.solver_ == "exact"
    scaled = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0)
    pooled = getattr(abess, ABESS[family])(support_size=count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pooled.fit(scaled, y)
        keep = np.flatnonzero(pooled.coef_).tolist()
        refit = OURS[family](0, keep=keep).fit(x, y, groups=groups)
    slack = 1e-3 * max(abs(_loss(refit)), 1e-3 * len(x))
    assert _loss(model) <= _loss(refit) + slack
    return model


@pytest.mark.parametrize("name", REGIMES)
def test_the_training_loss_is_no_worse_than_that_of_pooled_abess(name: str) -> None:
    regime = REGIMES[name]
    sites = regime.draw(1)
    model = _no_worse_than_abess(regime.family, sites.x, sites.y, sites.groups, regime.nonzero)
    one_shot = regime.family == "gaussian" and regime.features <= 1000
    assert model.n_iter_ == 1 if one_shot else model.n_iter_ <= MOST_ROUNDS
    losses = [record["loss"] for record in model.history_]
    assert (np.diff(losses) <= 1e-9 * np.abs(losses[1:])).all()


REAL = [
    *(("heart-disease", "binomial", count) for count in (2, 4, 6)),
    *(("communities-crime", "gaussian", count) for count in (5, 10, 20)),
    *(("golub-leukemia", "gaussian", count) for count in (2, 3)),
    ("golub-leukemia", "binomial", 1),
    *(("parkinsons-telemonitoring", "gaussian", count) for count in (2, 4, 8)),
    *(("fed-tcga-brca", "cox", count) for count in (3, 5, 10)),
]


@pytest.mark.parametrize(("name", "family", "count"), REAL)
def test_real_data_are_fitted_no_worse_than_by_pooled_abess(
    name: str, family: str, count: int
) -> None:
    if "PARSIFL_DATA" not in os.environ:
        pytest.skip("PARSIFL_DATA does not name a folder of data sets")
    try:
        loaded = data.load(name)
    except Exception as error:
        pytest.skip(f"{name} is not there: {error}")
    groups = loaded.groups if loaded.groups is not None else np.arange(len(loaded.y)) % 4
    model = _no_worse_than_abess(family, loaded.x, loaded.y, groups, count)
    assert model.n_iter_ <= MOST_ROUNDS


def test_separated_real_classes_are_reported() -> None:
    if "PARSIFL_DATA" not in os.environ:
        pytest.skip("PARSIFL_DATA does not name a folder of data sets")
    golub = data.load("golub-leukemia")
    model = FederatedSparseClassifier(2)
    with pytest.warns(ConvergenceWarning, match="separate the classes .* set l2"):
        model.fit(golub.x, golub.y, groups=np.arange(len(golub.y)) % 4)
    assert model.n_iter_ <= 40
    assert model.score(golub.x, golub.y) == 1.0


# ---------------------------------------------------------------------- where borders lie
@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson"])
def test_the_fit_does_not_depend_on_where_the_borders_lie(family: str) -> None:
    regime = Regime(family, sizes=(40,) * 5, features=30, nonzero=4, rho=0.8, strength=0.5)
    sites = regime.draw()
    pooled = OURS[family](4).fit(sites.x, sites.y)
    draw = np.random.default_rng(0)
    borders = [sites.groups, np.arange(200) % 20, draw.integers(0, 7, 200), np.arange(200)]
    for groups in borders:
        model = OURS[family](4).fit(sites.x, sites.y, groups=groups)
        np.testing.assert_allclose(model.coef_, pooled.coef_, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(model.intercept_, pooled.intercept_, rtol=1e-8)
        assert model.n_iter_ == pooled.n_iter_


# ---------------------------------------------------------------------- defects of the past
def test_small_clinics_get_the_coefficients_of_the_pooled_likelihood() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1200, 10))
    b = np.array([1, -1, 0.5] + [0] * 7)
    y = (draw.random(1200) < 1 / (1 + np.exp(-(x @ b - 1)))).astype(int)
    groups = np.repeat(np.arange(40), 30)
    pooled = sm.Logit(y, sm.add_constant(x[:, :3])).fit(disp=0, tol=1e-14, method="newton")
    for solver, rounds in (("auto", None), ("fedgradmp", 4), ("fedht", 20)):
        model = FederatedSparseClassifier(3, solver=solver, rounds=rounds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x, y, groups=groups)
        assert model.support_.tolist() == [0, 1, 2]
        np.testing.assert_allclose(model.coef_[0, :3], pooled.params[1:], rtol=1e-8)
        assert model.intercept_[0] == pytest.approx(pooled.params[0], rel=1e-8)


def test_one_measurement_in_two_units_does_no_harm() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((500, 8))
    x[:, 1] = (3 * x[:, 0]).round(2)
    y = x[:, 4] + x[:, 5] + 0.3 * x[:, 6] + draw.standard_normal(500)
    model = FederatedSparseRegressor(2).fit(x, y, groups=np.arange(500) % 5)
    assert model.support_.tolist() == [4, 5]
    x[:, 1] = 3 * x[:, 0]
    y = y + 2 * x[:, 0]
    model = FederatedSparseRegressor(3).fit(x, y, groups=np.arange(500) % 5)
    assert len({0, 1} & set(model.support_)) == 1
    assert {4, 5} <= set(model.support_)


@pytest.mark.parametrize("center", ["global", "client"])
def test_sites_of_one_class_or_one_row_are_taken(center: str) -> None:
    sites = Regime("binomial", sizes=(60, 60, 60), features=10, nonzero=2).draw(3)
    y, groups = sites.y.copy(), sites.groups.copy()
    y[groups == 1] = 1.0
    groups[0] = 7
    model = FederatedSparseClassifier(2, center=center).fit(sites.x, y, groups=groups)
    assert np.isfinite(model.coef_).all()
    assert np.abs(model.intercept_).max() < 10
    counts = np.where(groups == 1, 0.0, np.round(np.abs(3 * sites.x[:, 0])))
    poisson = FederatedSparsePoisson(2, center=center).fit(sites.x, counts, groups=groups)
    assert np.isfinite(poisson.coef_).all()
    time = np.stack([np.arange(180.0), (groups == 0).astype(float)], axis=1)
    assert np.isfinite(FederatedSparseCox(2).fit(sites.x, time, groups=groups).coef_).all()


def test_separation_is_reported_and_ridge_cures_it() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((120, 6))
    y = (x[:, 2] > 0).astype(int)
    with pytest.warns(ConvergenceWarning, match="set l2"):
        model = FederatedSparseClassifier(1).fit(x, y, groups=np.arange(120) % 3)
    assert model.support_.tolist() == [2]
    assert model.n_iter_ <= 40
    calm = FederatedSparseClassifier(1, l2=0.01).fit(x, y, groups=np.arange(120) % 3)
    assert calm.support_.tolist() == [2]
    # quasi-separation: one value of a binary column has events only
    rare = np.where(np.arange(120) < 8, 1.0, 0.0)
    y = np.where(rare > 0, 1, draw.integers(0, 2, 120))
    with pytest.warns(ConvergenceWarning, match="set l2"):
        FederatedSparseClassifier(1, keep=[0]).fit(np.c_[rare, x], y, np.arange(120) % 3)


@pytest.mark.parametrize("mean", [1.0, 20.0, 50.0, 1e3, 1e6])
def test_large_counts_are_not_reported_as_separated(mean: float) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((400, 4))
    y = draw.poisson(mean * np.exp(0.3 * x[:, 0] - 0.2 * x[:, 1]))
    oracle = sm.GLM(y, sm.add_constant(x[:, :2]), family=sm.families.Poisson())
    pooled = oracle.fit(tol=1e-15, maxiter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = FederatedSparsePoisson(0, keep=[0, 1]).fit(x, y, np.arange(400) % 4)
    found = [model.intercept_, *model.coef_[:2]]
    np.testing.assert_allclose(found, pooled.params, rtol=1e-8)


def test_a_level_without_counts_has_no_maximum() -> None:
    draw = np.random.default_rng(0)
    x = np.c_[draw.random(400) < 0.2, draw.standard_normal(400)].astype(float)
    y = np.where(x[:, 0] == 1, 0, draw.poisson(30.0, 400))
    with pytest.warns(ConvergenceWarning, match="set l2"):
        FederatedSparsePoisson(0, keep=[0, 1]).fit(x, y, np.arange(400) % 4)


# ---------------------------------------------------------------------- certificates
@pytest.mark.parametrize("seed", range(4))
def test_columns_that_are_nearly_equal_are_not_called_proven(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x, z = draw.standard_normal((100, 6)), draw.standard_normal(100)
    x[:, 1] = x[:, 0] + 1e-6 * z
    groups = np.arange(100) % 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ParsiflWarning)
        certificate = FederatedSparseRegressor(2).fit(x, z, groups).certificate_
    assert not certificate.proven  # columns 0 and 1 together explain z
    assert "not decidable at this precision" in certificate.reason
    with pytest.warns(ParsiflWarning, match="not decidable at this precision"):
        fixed = FederatedSparseRegressor(0, keep=[0, 1]).fit(x, z, groups)
    assert "not decidable at this precision" in fixed.summary().guarantee
    x[:, 1] = x[:, 0] + 1e-3 * z
    model = FederatedSparseRegressor(2).fit(x, z, groups)
    assert model.support_.tolist() == [0, 1]
    assert model.certificate_.proven


def test_a_certificate_of_equal_columns_holds_and_the_nodes_are_a_setting() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 30))
    x[:, 1:] += 2 * x[:, :-1]
    x[:, 3] = 1.8 * x[:, 2] + 32.0
    y = x @ draw.standard_normal(30) + 20 * draw.standard_normal(200)
    few = FederatedSparseRegressor(6, certificate_nodes=1).fit(x, y).certificate_
    assert not few.proven
    assert few.nodes == 1
    assert FederatedSparseRegressor(6, certificate_nodes=100_000).fit(x, y).certificate_.proven
    with pytest.raises(ValueError, match="certificate_nodes must be"):
        FederatedSparseRegressor(6, certificate_nodes=0).fit(x, y)


# ---------------------------------------------------------------------- settings
def test_few_rounds_and_odd_settings_are_named() -> None:
    sites = Regime("binomial", sizes=(60, 60), features=30, nonzero=2).draw()
    with pytest.warns(ConvergenceWarning, match="did not converge within rounds="):
        FederatedSparseClassifier(2, rounds=3).fit(sites.x, sites.y, sites.groups)
    with pytest.raises(ConfigError, match="unknown solver"):
        FederatedSparsePoisson(2, solver="fedht").fit(sites.x, sites.y)
    with pytest.raises(ValueError, match="participation"):
        FederatedSparseRegressor(2, solver="exact", participation=0.5).fit(sites.x, sites.y)
    with pytest.raises(ValueError, match="max_bytes"):
        FederatedSparseRegressor(2, max_bytes=0).fit(sites.x, sites.y)
    with pytest.raises(ValueError, match="column_groups must name"):
        FederatedSparseRegressor(2, column_groups=[1]).fit(sites.x, sites.y)


def test_bytes_choose_the_solver_and_the_reason_is_given() -> None:
    sites = Regime(sizes=(60, 60), features=50, nonzero=2).draw()
    model = FederatedSparseRegressor(2).fit(sites.x, sites.y, sites.groups)
    assert model.solver_ == "exact"
    assert "within max_bytes=8000000" in model.solver_reason_
    assert model.n_iter_ == 1
    rounds = FederatedSparseRegressor(2, max_bytes=9000).fit(sites.x, sites.y, sites.groups)
    assert rounds.solver_ == "exact"
    assert rounds.n_iter_ > 1
    np.testing.assert_allclose(rounds.coef_, model.coef_, rtol=1e-9, atol=1e-12)
    assert max(record["bytes_up"] for record in rounds.history_) <= 2 * 9200
    small = FederatedSparseRegressor(2, max_bytes=1000).fit(sites.x, sites.y, sites.groups)
    assert small.solver_ == "fedgradmp"
    assert "max_bytes=1000 is too small" in small.solver_reason_


@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson"])
def test_sparse_matrices_and_weights_give_the_same_fit(family: str) -> None:
    regime = Regime(family, sizes=(50,) * 4, features=20, nonzero=3, strength=0.6)
    sites = regime.draw(2)
    x = sites.x * (np.random.default_rng(1).random(sites.x.shape) < 0.5)
    weight = np.random.default_rng(2).integers(0, 3, len(x))
    model = OURS[family](3)
    dense = clone(model).fit(x, sites.y, groups=sites.groups, sample_weight=weight)
    csr = clone(model).fit(sp.csr_matrix(x), sites.y, sites.groups, sample_weight=weight)
    rows = np.repeat(np.arange(len(x)), weight)
    repeated = clone(model).fit(x[rows], sites.y[rows], groups=sites.groups[rows])
    for other in (csr, repeated):
        np.testing.assert_allclose(other.coef_, dense.coef_, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(other.intercept_, dense.intercept_, rtol=1e-7)


def test_groups_of_columns_enter_together() -> None:
    draw = np.random.default_rng(0)
    level = draw.integers(0, 4, 300)
    dummies = np.eye(4)[level][:, 1:]
    x = np.c_[draw.standard_normal((300, 5)), dummies]
    y = x[:, 1] + np.array([0.0, 1.0, -1.0, 0.5])[level] + 0.5 * draw.standard_normal(300)
    groups = [0, 1, 2, 3, 4, "ward", "ward", "ward"]
    model = FederatedSparseRegressor(2, column_groups=groups)
    model.fit(x, y, groups=np.arange(300) % 3)
    assert model.support_.tolist() == [1, 5, 6, 7]
    kept = clone(model).set_params(n_nonzero_coefs=1, keep=[5]).fit(x, y)
    assert kept.support_.tolist() == [1, 5, 6, 7]
    assert model.certificate_.proven


def test_ridge_is_that_of_the_pooled_problem() -> None:
    sites = Regime(sizes=(50, 70), features=6, nonzero=2).draw()
    model = FederatedSparseRegressor(6, l2=0.1).fit(sites.x, sites.y, sites.groups)
    z = (sites.x - sites.x.mean(0)) / sites.x.std(0)
    pooled = np.linalg.solve(
        z.T @ z / 120 + 0.1 * np.eye(6), z.T @ (sites.y - sites.y.mean()) / 120
    )
    np.testing.assert_allclose(model.coef_ * sites.x.std(0), pooled, rtol=1e-9)


def test_the_certificate_is_right() -> None:
    sites = Regime(sizes=(40, 40), features=14, nonzero=4, rho=0.9, strength=0.3).draw()
    model = FederatedSparseRegressor(4).fit(sites.x, sites.y, sites.groups)
    assert model.certificate_.proven
    assert model.certificate_.gap == 0.0
    logistic = FederatedSparseClassifier(2).fit(sites.x, sites.y > 0, sites.groups)
    assert not logistic.certificate_.proven
    assert np.isnan(logistic.certificate_.gap)
    wide = Regime(sizes=(20, 20), features=120, nonzero=4).draw()
    open_ = FederatedSparseRegressor(4).fit(wide.x, wide.y, wide.groups).certificate_
    assert not open_.proven
    assert 0 < open_.gap <= 1 + 1e-9


@pytest.mark.parametrize("family", ["binomial", "poisson", "cox"])
def test_further_rounds_prove_what_enumeration_shows(family: str) -> None:
    regime = Regime(family=family, sizes=(50, 60), features=7, nonzero=3, rho=0.8, strength=0.4)
    sites = regime.draw(1)
    data = sites.x, sites.y, sites.groups
    model = OURS[family](2, certificate_rounds=100).fit(*data)
    losses = [
        OURS[family](0, keep=list(columns)).fit(*data).loss_
        for columns in itertools.combinations(range(7), 2)
    ]
    assert model.loss_ == pytest.approx(min(losses), rel=1e-9)
    found = model.certificate_
    assert found.proven
    assert 0 < found.rounds <= 40
    assert f"{found.rounds} further rounds" in found.reason
    plain = OURS[family](2).fit(*data)
    assert plain.coef_.tolist() == model.coef_.tolist()
    assert plain.bytes_up_ < model.bytes_up_
    assert np.isnan(plain.certificate_.gap)
    assert "certificate_rounds" in plain.certificate_.reason
    few = OURS[family](2, certificate_rounds=3).fit(*data).certificate_
    assert not few.proven
    assert few.rounds == 3


def test_a_certificate_of_a_worse_support_says_by_how_much() -> None:
    sites = Regime(family="binomial", sizes=(80, 80), features=6, nonzero=2, rho=0.5).draw(2)
    worst = [j for j in range(6) if not sites.truth[j]][:2]
    best = FederatedSparseClassifier(2).fit(sites.x, sites.y, sites.groups)
    z = (sites.x - sites.x.mean(0)) / sites.x.std(0)
    problem = GLM(6, "logistic", intercept=True, weighted=True)
    y = torch.from_numpy(np.stack([sites.y, np.ones(160)], axis=1))
    parts = [np.flatnonzero(sites.groups == site) for site in (0, 1)]
    cut = Sites.of(z, y, parts)
    other = Sites.of(z[:, [*worst, *(j for j in range(6) if j not in worst)]], y, parts)
    algorithm = FedBestSubset(tau=2)
    right = exact_fit(algorithm, problem, cut, np.zeros(7), rounds=50)
    kept = GLM(6, "logistic", intercept=True, weighted=True, keep=[0, 1])
    wrong = exact_fit(FedBestSubset(tau=0), kept, other, np.zeros(7), rounds=50)
    fit = replace(right, search=replace(right.search, loss=wrong.search.loss))
    found = certified(fit, algorithm, problem, cut, 100).certificate
    gap = 1 - best.loss_ * 160 / wrong.search.loss
    assert not found.proven
    assert found.gap == pytest.approx(gap, rel=1e-6)
    assert "has a loss that is smaller by" in found.reason


def test_many_columns_and_sites_are_fitted_in_bounded_memory() -> None:
    draw = np.random.default_rng(0)
    x: Any = sp.random_array((2000, 20_000), density=0.002, rng=draw, format="csr")
    y = 5 * x[:, [3]].toarray()[:, 0] - 5 * x[:, [700]].toarray()[:, 0]
    y = y + 0.01 * draw.standard_normal(2000)
    tracemalloc.start()
    try:
        model = FederatedSparseRegressor(2).fit(x, y, groups=np.arange(2000) % 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.solver_ == "exact"
    assert model.support_.tolist() == [3, 700]
    assert model.n_iter_ <= 6
    assert peak < 30 * x.data.nbytes  # 20,000 x 20,000 products would take 3.2 GB


def test_site_intercepts_are_the_dummies_of_the_pooled_fit() -> None:
    regime = Regime("binomial", sizes=(90, 90, 90), features=8, nonzero=2, intercepts=1.5)
    sites = regime.draw(2)
    dummies = np.eye(3)[sites.groups]
    for family, kind in (("binomial", sm.families.Binomial()), ("poisson", sm.families.Poisson())):
        model = OURS[family](2, center="client").fit(sites.x, sites.y, groups=sites.groups)
        design = np.c_[sites.x[:, model.support_], dummies]
        pooled = sm.GLM(sites.y, design, family=kind).fit(tol=1e-14, maxiter=200)
        found = model.coef_.ravel()[model.support_]
        np.testing.assert_allclose(found, pooled.params[:2], rtol=1e-8)


@pytest.mark.parametrize("center", ["global", "client"])
def test_an_exposure_is_that_of_the_pooled_fit(center: str) -> None:
    sites = Regime("poisson", sizes=(90, 90, 90), features=8, nonzero=2, strength=0.4).draw(2)
    exposure = np.random.default_rng(0).uniform(0.5, 20.0, 270)
    y = np.random.default_rng(1).poisson(exposure * np.exp(sites.x @ sites.truth - 1))
    model = FederatedSparsePoisson(2, center=center)
    model.fit(sites.x, y, groups=sites.groups, offset=np.log(exposure))
    assert model.support_.tolist() == np.flatnonzero(sites.truth).tolist()
    levels = np.eye(3)[sites.groups] if center == "client" else np.ones((270, 1))
    design = np.c_[sites.x[:, model.support_], levels]
    oracle = sm.GLM(y, design, family=sm.families.Poisson(), offset=np.log(exposure))
    pooled = oracle.fit(tol=1e-14, maxiter=200)
    np.testing.assert_allclose(model.coef_[model.support_], pooled.params[:2], rtol=1e-8)
    mean = model.predict(sites.x, offset=np.log(exposure))
    assert mean.sum() == pytest.approx(y.sum(), rel=1e-6)
    with pytest.raises(ValueError, match="offset must be a finite number"):
        model.fit(sites.x, y, offset=[1.0])


def test_a_warning_names_no_setting_that_the_solver_lacks() -> None:
    draw = np.random.default_rng(0)
    x, groups = draw.normal(size=(200, 12)), np.repeat(np.arange(4), 50)
    y = (3 * x[:, 1] - 2 * x[:, 5] + 0.1 * draw.normal(size=200) > 0).astype(int)
    y[groups == 0] = 1
    model = FederatedSparseClassifier(2, solver="fedgradmp", l2=0.0, rounds=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, groups=groups)
    assert caught
    assert not any("lr" in str(warning.message).split() for warning in caught)
    assert np.isfinite(model.coef_).all()


def test_noise_that_differs_by_site_is_weighted_away() -> None:
    draw = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2, 3], 250)
    x = draw.normal(size=(1000, 60))
    truth = np.zeros(60)
    truth[:6] = 0.35
    noise = np.array([0.3, 1.0, 3.0, 6.0])[groups] * draw.normal(size=1000)
    y = x @ truth + noise
    plain = FederatedSparseRegressor(6).fit(x, y, groups)
    model = FederatedSparseRegressor(6, site_variances=True).fit(x, y, groups)
    assert model.support_.tolist() == list(range(6))
    assert np.linalg.norm(model.coef_ - truth) < np.linalg.norm(plain.coef_ - truth) / 2
    assert np.allclose(np.sqrt(model.site_variances_), [0.3, 1.0, 3.0, 6.0], rtol=0.15)
    assert model.bytes_up_ == 3 * plain.bytes_up_
    with pytest.raises(ConfigError, match="site_variances requires linear regression"):
        FederatedSparseClassifier(2, site_variances=True).fit(x, y > 0, groups)
    with pytest.raises(ValueError, match="site_variances=True needs solver='exact'"):
        FederatedSparseRegressor(6, site_variances=True, solver="fedht").fit(x, y, groups)


def test_settings_of_the_algorithms_are_passed_on() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 30))
    y, groups = x[:, 3] + 0.1 * draw.normal(size=200), np.arange(200) % 4
    few = FederatedSparseRegressor(1, solver_options={"candidates": 3}).fit(x, y, groups)
    assert few.bytes_up_ < FederatedSparseRegressor(1).fit(x, y, groups).bytes_up_
    assert few.support_.tolist() == [3]
    ball = FederatedSparseRegressor(
        1, solver="inexactfedgradmp", refit=False, solver_options={"radius": 0.5}
    )
    assert np.abs(ball.fit(x, y, groups).coef_ * x.std(axis=0)).max() <= 0.5 + 1e-9
    with pytest.raises(ConfigError, match="candidate"):
        FederatedSparseRegressor(1, solver_options={"candidate": 3}).fit(x, y, groups)
    with pytest.raises(ConfigError, match="solver_options must map"):
        FederatedSparseRegressor(1, solver_options=3).fit(x, y, groups)


@pytest.mark.parametrize("solver", ["fedgradmp", "inexactfedgradmp"])
def test_pursuit_survives_one_measurement_in_two_units(solver: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((500, 8))
    x[:, 1] = (3 * x[:, 0]).round(2)
    u = x[:, 4] + x[:, 5] + 0.3 * x[:, 6]
    y, sites = u + draw.standard_normal(500), np.arange(500) % 5
    model = FederatedSparseRegressor(2, solver=solver).fit(x, y, sites)
    assert model.support_.tolist() == [4, 5]
    kept = FederatedSparseRegressor(2, solver=solver, keep=[6]).fit(x, y, sites)
    assert kept.support_.tolist() == [4, 5, 6]
    sparse_x = FederatedSparseRegressor(2, solver=solver).fit(sp.csr_matrix(x), y, sites)
    assert sparse_x.support_.tolist() == [4, 5]
    labels = 3 * u + draw.logistic(size=500) > 0
    classes = FederatedSparseClassifier(2, solver=solver).fit(x, labels, sites)
    assert classes.support_.tolist() == [4, 5]


def test_the_pruning_of_the_paper_stays_available() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((500, 8))
    x[:, 1] = (3 * x[:, 0]).round(2)
    y = x[:, 4] + x[:, 5] + 0.3 * x[:, 6] + draw.standard_normal(500)
    options = {"prune": "largest"}
    model = FederatedSparseRegressor(2, solver="fedgradmp", solver_options=options)
    assert model.fit(x, y, np.arange(500) % 5).support_.tolist() == [0, 1]
