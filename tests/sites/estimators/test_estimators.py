"""The estimators as scikit-learn sees them, and as a statistician does."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import sklearn
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from parsifl.core.errors import ConfigError
from parsifl.linear.sparsity import dictionary
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    stability_selection,
)

pytestmark = pytest.mark.filterwarnings("ignore:the loss has not converged")
TRUTH = np.array([0.0, 3.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 1.0, 0.0])


def _regression(noise: float = 0.1, seed: int = 0) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((120, 10)) * np.arange(1, 11) + 5.0
    return x, x @ TRUTH + 4.0 + noise * draw.standard_normal(120), np.arange(120) % 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        FederatedSparseRegressor(),
        FederatedSparseRegressor(solver="fedgradmp", rounds=5),
        FederatedSparseClassifier(rounds=12),
        FederatedSparsePoisson(),
        FederatedSparseCox(),
        FederatedSparseRegressorCV(path=[1], cv=2),
    ],
    ids=lambda e: f"{type(e).__name__}-{getattr(e, 'solver', '')}",
)
def test_scikit_learn_s_own_checks(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed


def test_it_finds_the_coefficients_in_original_units() -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(3, rounds=5, solver="fedgradmp").fit(x, y, groups=clients)
    assert model.support_.tolist() == [1, 4, 8]
    pooled = LinearRegression().fit(x[:, [1, 4, 8]], y)
    np.testing.assert_allclose(model.coef_[[1, 4, 8]], pooled.coef_, rtol=1e-10)
    assert model.intercept_ == pytest.approx(pooled.intercept_, rel=1e-10)
    raw = clone(model).set_params(refit=False).fit(x, y, groups=clients)
    np.testing.assert_allclose(raw.coef_[[1, 4, 8]], pooled.coef_, rtol=2e-2)
    assert raw.bytes_up_ < model.bytes_up_
    assert model.bytes_up_ > 0
    assert model.bytes_down_ > 0
    assert all(record["support"] == [1, 4, 8] for record in model.history_)
    assert model.loss_ <= min(record["loss"] for record in model.history_)
    assert model.n_iter_ == len(model.history_) <= 5


def test_one_client_is_least_squares_on_the_support() -> None:
    x, y, _ = _regression()
    model = FederatedSparseRegressor(3, rounds=4).fit(x, y)
    pooled = LinearRegression().fit(x[:, [1, 4, 8]], y)
    np.testing.assert_allclose(model.coef_[[1, 4, 8]], pooled.coef_, rtol=1e-10)
    np.testing.assert_allclose(model.predict(x), pooled.predict(x[:, [1, 4, 8]]), rtol=1e-10)


@pytest.mark.parametrize(
    "solver", ["fedht", "fediterht", "distributediht", "fedmid", "feddualavg", "inexactfedgradmp"]
)
def test_every_solver_finds_the_support(solver: str) -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(3, solver=solver, rounds=60, local_steps=5)
    assert model.fit(x, y, groups=clients).support_.tolist() == [1, 4, 8]
    assert model.score(x, y) > 0.99


def test_sparse_matrices_give_what_dense_ones_do_without_centring() -> None:
    x, y, clients = _regression()
    x = x * (np.random.default_rng(1).random(x.shape) < 0.5)
    y = x @ TRUTH + 4.0
    dense = FederatedSparseRegressor(3, rounds=6).fit(x, y, groups=clients)
    csr = FederatedSparseRegressor(3, rounds=6).fit(sp.csr_matrix(x), y, groups=clients)
    np.testing.assert_allclose(csr.coef_, dense.coef_, atol=1e-9)
    assert csr.intercept_ == pytest.approx(4.0)


def test_site_effects_vanish_when_clients_are_centred_by_themselves() -> None:
    x, y, clients = _regression(noise=0.0)
    shifted = y + 50.0 * clients
    plain = FederatedSparseRegressor(3, rounds=5).fit(x, shifted, groups=clients)
    sites = FederatedSparseRegressor(3, rounds=5, center="client").fit(x, shifted, groups=clients)
    np.testing.assert_allclose(sites.coef_, TRUTH, atol=1e-9)
    assert np.abs(plain.coef_ - TRUTH).max() > 1e-3


def test_kept_covariates_come_on_top() -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(1, rounds=5, keep=[0, 4]).fit(x, y, groups=clients)
    assert {0, 4} <= set(model.support_)
    assert len(model.support_) == 3
    mask = np.arange(10) == 4
    assert 4 in FederatedSparseRegressor(1, rounds=5, keep=mask).fit(x, y, clients).support_


def test_weights_repeat_rows() -> None:
    x, y, _ = _regression(noise=1.0)
    weight = np.random.default_rng(0).integers(0, 3, 120)
    weighted = FederatedSparseRegressor(3, rounds=4).fit(x, y, sample_weight=weight)
    repeated = FederatedSparseRegressor(3, rounds=4).fit(
        np.repeat(x, weight, axis=0), np.repeat(y, weight)
    )
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-8, atol=1e-10)


def test_a_dictionary_selects_atoms_and_is_booked() -> None:
    psi = dictionary.orthonormal(10, 10, seed=0).numpy()
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 10))
    y = x @ (psi[:, 3] * 2.0)
    plain = FederatedSparseRegressor(1, rounds=3, standardize=False)
    model = FederatedSparseRegressor(1, rounds=3, standardize=False, dictionary=psi)
    model.fit(x, y, groups=np.arange(200) % 4)
    assert model.support_.tolist() == [3]
    np.testing.assert_allclose(model.coef_, 2 * psi[:, 3], atol=1e-9)
    assert model.bytes_down_ > plain.fit(x, y, np.arange(200) % 4).bytes_down_ + 4 * 800


@pytest.mark.parametrize("kind", ["gaussian", "orthonormal"])
def test_a_random_dictionary_travels_as_a_seed(kind: Any) -> None:
    recipe = dictionary.RandomDictionary(kind, 10, 10, seed=3)
    atoms, x = recipe.draw().numpy(), np.random.default_rng(0).standard_normal((200, 10))
    y, clients = x @ (atoms[:, 3] * 2.0), np.arange(200) % 4
    model = FederatedSparseRegressor(1, rounds=4, standardize=False, dictionary=recipe)
    seeded = clone(model).fit(x, y, groups=clients)
    sent = clone(model).set_params(dictionary=atoms).fit(x, y, groups=clients)
    assert seeded.support_.tolist() == [3]
    np.testing.assert_array_equal(seeded.coef_, sent.coef_)
    assert seeded.dictionary_bytes_ < 4 * 100
    assert sent.dictionary_bytes_ > 4 * 800
    difference = sent.dictionary_bytes_ - seeded.dictionary_bytes_
    assert sent.bytes_down_ - seeded.bytes_down_ == difference
    classifier = FederatedSparseClassifier(1, standardize=False, dictionary=recipe, l2=0.01)
    assert classifier.fit(x, y > 0, groups=clients).dictionary_bytes_ == seeded.dictionary_bytes_


def test_a_dictionary_that_is_no_matrix_is_refused() -> None:
    x, y, clients = _regression()
    with pytest.raises(ValueError, match="finite matrix"):
        FederatedSparseRegressor(1, dictionary=[1.0, np.nan]).fit(x, y, groups=clients)
    recipe = dictionary.RandomDictionary("gaussian", 3, 3)
    with pytest.raises(ConfigError, match=r"shape \[3, 3\]"):
        FederatedSparseRegressor(1, dictionary=recipe).fit(x, y, groups=clients)


def test_the_step_of_the_theory_is_a_sixth_of_the_usual_one() -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(3, solver="fedht", rounds=1, local_steps=1, refit=False)
    usual = clone(model).fit(x, y, groups=clients)
    careful = clone(model).set_params(lr="theory").fit(x, y, groups=clients)
    np.testing.assert_allclose(careful.coef_, usual.coef_ / 6, rtol=1e-12)


@pytest.mark.parametrize("labels", [2, 3])
def test_classes_are_found_even_where_a_client_has_one_only(labels: int) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((240, 8)) * 3 + 1
    names = np.array(["a", "b", "c"])[:labels]
    scores = np.stack([x[:, 2], -x[:, 5], x[:, 7]], 1)[:, :labels]
    y = names[scores.argmax(1)]
    clients = np.where(y == "a", 0, 1 + np.arange(240) % 3)
    model = FederatedSparseClassifier(3, rounds=40, solver="fediterht", local_steps=2, l2=0.01)
    model.fit(x, y, groups=clients)
    assert model.score(x, y) > 0.85
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1.0)
    assert (model.classes_[model.predict_proba(x).argmax(1)] == model.predict(x)).all()
    assert model.coef_.shape == (1 if labels == 2 else 3, 8)
    assert int((model.coef_ != 0).sum(1).max()) <= 3


def test_more_than_two_classes_have_an_exact_fit_against_the_rest() -> None:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(300, 6))
    scores = np.stack([2 * X[:, 0], 2 * X[:, 3], -2 * X[:, 5]], axis=1)
    y, groups = (scores + draw.gumbel(size=scores.shape)).argmax(axis=1), np.arange(300) % 4
    exact = FederatedSparseClassifier(2, solver="exact")
    with pytest.raises(ValueError, match="OneVsRestClassifier"):
        exact.fit(X, y, groups)
    auto = FederatedSparseClassifier(2).fit(X, y, groups)
    assert auto.solver_ == "fedht"
    assert "a vector of coefficients for each class" in auto.solver_reason_
    with sklearn.config_context(enable_metadata_routing=True):
        rest = OneVsRestClassifier(exact.set_fit_request(groups=True))
        rest.fit(X, y, groups=groups)
    for number, model in enumerate(rest.estimators_):
        alone = FederatedSparseClassifier(2).fit(X, y == number, groups)
        assert model.solver_ == "exact"
        np.testing.assert_allclose(model.coef_, alone.coef_, rtol=1e-9, atol=1e-12)


def test_grid_search_with_clients_through_metadata_routing() -> None:
    x, y, clients = _regression()
    with sklearn.config_context(enable_metadata_routing=True):
        model = FederatedSparseRegressor(rounds=3).set_fit_request(groups=True)
        search = GridSearchCV(model, {"n_nonzero_coefs": [1, 3]}, cv=GroupKFold(2))
        search.fit(x, y, groups=clients)
    assert search.best_params_ == {"n_nonzero_coefs": 3}


def test_it_works_in_a_pipeline() -> None:
    x, y, clients = _regression()
    pipeline = make_pipeline(FunctionTransformer(), FederatedSparseRegressor(3, rounds=3))
    pipeline.fit(x, y, federatedsparseregressor__groups=clients)
    assert pipeline.score(x, y) > 0.99


def test_the_path_chooses_the_right_number_by_clients_left_out() -> None:
    x, y, clients = _regression(noise=2.0)
    base = FederatedSparseRegressor(rounds=4)
    model = FederatedSparseRegressorCV([1, 2, 3, 5], cv=4, estimator=base)
    model.fit(x, y, groups=clients)
    assert model.n_nonzero_coefs_ == 3
    assert model.error_path_.shape == (4, 4)
    assert model.support_.tolist() == [1, 4, 8]
    assert model.bytes_up_ == model.best_estimator_.bytes_up_  # one message has it all
    fits = FederatedSparseRegressor(rounds=4, center="client")
    again = FederatedSparseRegressorCV(path=[1, 2, 3, 5], cv=4, estimator=fits).fit(x, y, clients)
    assert again.bytes_up_ > 16 * again.best_estimator_.bytes_up_ / 2


def test_a_small_site_does_not_outvote_a_large_one() -> None:
    draw = np.random.default_rng(0)
    x, sites = draw.standard_normal((420, 6)), np.r_[np.repeat([0, 1], 200), np.repeat([2, 3], 10)]
    y = 2 * x[:, 0] + 0.5 * x[:, 1] + 0.3 * draw.standard_normal(420)
    y[sites >= 2] += -1.5 * x[sites >= 2, 1]
    model = FederatedSparseRegressorCV([1, 2], cv=4).fit(x, y, groups=sites)
    assert model.error_path_.mean(axis=1).argmin() == 0
    assert model.n_nonzero_coefs_ == 2


@pytest.mark.parametrize("by", ["clients", "rows"])
def test_stable_features_are_selected_nearly_always(by: Any) -> None:
    x, y, clients = _regression()
    found = stability_selection(
        FederatedSparseRegressor(4, rounds=3), x, y, clients, subsamples=10, by=by
    )
    assert {1, 4, 8} <= set(found.support)
    assert (found.frequency[[1, 4, 8]] == 1.0).all()
    assert found.selected <= 4
    with pytest.raises(ConfigError, match="threshold"):
        stability_selection(FederatedSparseRegressor(), x, y, clients, threshold=0.5)


def test_few_rows_are_said_aloud() -> None:
    x, y, clients = _regression()
    with pytest.warns(UserWarning, match="2 of 2 clients have fewer rows"):
        FederatedSparseRegressor(8, rounds=1, solver="fedgradmp").fit(
            x[:12], y[:12], groups=clients[:12] % 2
        )


def test_constant_columns_get_no_coefficient() -> None:
    x, y, clients = _regression()
    x[:, 3] = 7.0
    model = FederatedSparseRegressor(10, rounds=3).fit(x, y, groups=clients)
    assert model.coef_[3] == 0.0
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_nonzero_coefs": 11}, "between 1 and 10 features"),
        ({"n_nonzero_coefs": 0}, "between 1 and 10 features"),
        ({"n_nonzero_coefs": 2.5}, "between 1 and 10 features"),
        ({"n_nonzero_coefs": "2"}, "between 1 and 10 features"),
        ({"n_nonzero_coefs": True}, "between 1 and 10 features, got True"),
        ({"l2": "a"}, "l2 must be finite and at least 0, got 'a'"),
        ({"l2": True}, "l2 must be finite"),
        ({"local_steps": "3"}, "local_steps must be a whole number and at least 1, got '3'"),
        ({"rounds": "3"}, "rounds must be a whole number"),
        ({"batch_size": "all"}, "batch"),
        ({"participation": "half"}, "^participation = 'half': Input should be a valid number"),
        ({"solver": "lasso"}, "unknown solver"),
        ({"center": "nobody"}, "center must be"),
        ({"keep": [10]}, "keep names feature 10"),
        ({"keep": ["age"]}, "which X does not have"),
        ({"keep": [[1, 2]]}, "keep must list positions"),
        ({"keep": [True, False]}, "a mask of all 10"),
        ({"lr": "fast", "solver": "fedht"}, "lr must be a number"),
        ({"dictionary": "nope"}, "finite matrix .* got 'nope'"),
        ({"dictionary": np.eye(10, 5), "n_nonzero_coefs": 6}, "between 1 and 5 atoms"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    x, y, clients = _regression()
    with pytest.raises((ValueError, ConfigError), match=message):
        FederatedSparseRegressor(**change).fit(x, y, groups=clients)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_data_are_refused(bad: float) -> None:
    x, y, clients = _regression()
    broken = x.copy()
    broken[3, 3] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        FederatedSparseRegressor().fit(broken, y, groups=clients)
    with pytest.raises(ValueError, match="groups must name"):
        FederatedSparseRegressor().fit(x, y, groups=clients[:-1])
    with pytest.raises(ValueError, match="only one class"):
        FederatedSparseClassifier().fit(x, np.zeros(120), groups=clients)
    with pytest.raises(ValueError, match="negative"):
        FederatedSparseRegressor().fit(x, y, sample_weight=np.full(120, -1.0))
    with pytest.raises(ValueError, match=r"non-zero number|zero for every row"):
        FederatedSparseRegressor().fit(x, y, sample_weight=np.zeros(120))
    with pytest.raises(ValueError, match="missing"):
        FederatedSparseRegressor().fit(x, y, groups=np.where(clients == 1, np.nan, clients))
    with pytest.raises(ValueError, match="missing"):
        FederatedSparseRegressor().fit(x, y, groups=np.array([None, *"a" * 119], dtype=object))


@pytest.mark.parametrize("solver", ["fedgradmp", "fedht"])
def test_rows_of_weight_zero_are_as_good_as_absent(solver: str) -> None:
    x, y, clients = _regression()
    weight = np.where(clients == 2, 0.0, 1.0) * np.where(np.arange(120) % 5, 1.0, 0.0)
    model = FederatedSparseRegressor(3, solver=solver, l2=0.1, rounds=4)
    there = clone(model).fit(x, y, groups=clients, sample_weight=weight)
    gone = weight > 0
    absent = clone(model).fit(x[gone], y[gone], groups=clients[gone])
    assert np.allclose(there.coef_, absent.coef_, rtol=1e-9)


@pytest.mark.parametrize("solver", ["fedht", "fediterht", "fedmid", "feddualavg"])
def test_unequal_weights_do_not_make_the_steps_too_long(solver: str) -> None:
    x, y, clients = _regression()
    weight = np.where(np.arange(120) < 4, 200.0, 1.0)
    model = FederatedSparseRegressor(3, solver=solver, rounds=60, refit=False)
    model.fit(x, y, groups=clients, sample_weight=weight)
    assert np.abs(model.coef_).max() < 10.0


@pytest.mark.parametrize("path", [[], [0, 2], [1, 11], [1.5]])
def test_a_path_that_cannot_be_walked_is_refused(path: list[Any]) -> None:
    x, y, clients = _regression()
    with pytest.raises(ValueError, match="path must list numbers"):
        FederatedSparseRegressorCV(path).fit(x, y, groups=clients)


def test_stability_selection_refuses_what_it_cannot_halve() -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(3, rounds=1)
    wrong: list[dict[str, Any]] = [
        {"by": "nobody"}, {"subsamples": 0}, {"subsamples": True}, {"threshold": "often"},
        {"seed": "a"},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ConfigError, match=f"{next(iter(change))} must be"):
            stability_selection(model, x, y, clients, **change)
    with pytest.raises(ValueError, match="missing"):
        stability_selection(model, x, y, np.where(clients == 1, np.nan, clients))
    with pytest.raises(ValueError, match="inconsistent numbers"):
        stability_selection(model, x, y, clients[:-1])
    with pytest.raises(ConfigError, match="needs at least 2 clients"):
        stability_selection(model, x, y, np.zeros(120))
    lists = stability_selection(model, x.tolist(), y.tolist(), clients.tolist(), subsamples=2)
    assert lists.frequency.shape == (10,)


def test_a_run_that_diverges_says_so() -> None:
    x, y, clients = _regression()
    model = FederatedSparseRegressor(3, solver="fedht", lr=100.0, rounds=20)
    with pytest.warns(ConvergenceWarning, match="smaller lr"):
        model.fit(x, y, groups=clients)


def _separable() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    x, groups = draw.normal(size=(200, 12)), np.repeat(list("ABCD"), 50)
    y = (3 * x[:, 1] - 2 * x[:, 5] + 0.1 * draw.normal(size=200) > 0).astype(int)
    return x, np.where(groups == "A", 1, y), groups


@pytest.mark.parametrize("solver", ["exact", "inexactfedgradmp", "fedht"])
def test_a_site_with_one_class_is_taken(solver: str) -> None:
    x, y, groups = _separable()
    model = FederatedSparseClassifier(2, solver=solver).fit(x, y, groups=groups)
    assert model.score(x, y) > 0.75
    assert np.abs(model.intercept_).max() < 5


def test_weights_that_leave_one_class_are_refused() -> None:
    x, y, groups = _separable()
    with pytest.raises(ValueError, match="positive sample_weight belong to one class"):
        FederatedSparseClassifier(2).fit(x, y, groups=groups, sample_weight=y.astype(float))


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_features_that_cannot_be_squared_are_refused(form: Any) -> None:
    x, y, _ = _separable()
    with pytest.raises(ValueError, match="cannot be squared; rescale"):
        FederatedSparseRegressor(2).fit(form(x * 1e160), y.astype(float))


def test_the_step_size_refers_to_half_of_the_squared_error() -> None:
    """One gradient step from zero on one site: lr times the mean of x y, without a factor of 2."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(50, 3)), draw.normal(size=50)
    model = FederatedSparseRegressor(
        3, solver="fedht", rounds=1, local_steps=1, batch_size=None, lr=0.1,
        standardize=False, fit_intercept=False, refit=False,
    ).fit(x, y, groups=np.zeros(50))  # fmt: skip
    np.testing.assert_allclose(model.coef_, 0.1 * x.T @ y / 50, rtol=1e-9)
    assert "(u - y)^2 / 2" in str(FederatedSparseRegressor.__doc__)
