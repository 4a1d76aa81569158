"""Data and settings that are taken, but of which the estimators say what becomes of them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    stability_selection,
)

pytestmark = pytest.mark.filterwarnings("ignore:the loss has not converged")


def _data(offset: float = 0.0) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((120, 10)) + offset * np.linspace(0.01, 1.0, 10)
    return x, 3 * x[:, 1] - 2 * x[:, 4] + 0.1 * draw.standard_normal(120), np.arange(120) % 4


def test_names_of_clients_that_have_no_order_are_refused() -> None:
    x, y, _ = _data()
    mixed = np.array([1, "a", 2.5, "b"] * 30, dtype=object)
    with pytest.raises(ValueError, match=r"cannot be ordered \(float, int, str\)"):
        FederatedSparseRegressor(2).fit(x, y, groups=mixed)
    with pytest.raises(ValueError, match="cannot be ordered"):
        stability_selection(FederatedSparseRegressor(2), x, y, mixed)


def test_with_a_dictionary_coefficients_are_counted_by_atoms() -> None:
    x, y, clients = _data()
    atoms = np.random.default_rng(1).standard_normal((10, 30))
    model = FederatedSparseRegressor(10, rounds=2, dictionary=atoms).set_params(n_nonzero_coefs=15)
    assert len(model.fit(x, y, groups=clients).support_) == 15
    assert len(model.set_params(n_nonzero_coefs=None).fit(x, y, groups=clients).support_) == 3
    path = FederatedSparseRegressorCV([1, 12], cv=2, estimator=model).fit(x, y, groups=clients)
    assert path.path_.tolist() == [1, 12]
    with pytest.raises(ValueError, match="between 1 and 30"):
        FederatedSparseRegressorCV([31], cv=2, estimator=model).fit(x, y, groups=clients)


@pytest.mark.parametrize("value", [7.0, 0.1, 1e6 / 3])
def test_a_kept_column_that_is_constant_is_said_to_be_absent(value: float) -> None:
    x, y, clients = _data()
    x[:, 3] = value
    model = FederatedSparseRegressor(2, keep=[3], rounds=3)
    constant = "keep names feature 3, which is constant and thus equivalent to the intercept:"
    classifier = FederatedSparseClassifier(2, keep=[3], solver="fedht", rounds=3, l2=0.01)
    for rows in (x, sp.csr_matrix(x)):
        with pytest.warns(UserWarning, match=constant):
            model.fit(rows, y, groups=clients)
        assert model.support_.tolist() == [1, 4]
        assert model.score(rows, y) > 0.99
        with pytest.warns(UserWarning, match=constant):
            classifier.fit(rows, y > 0, groups=clients)
        assert classifier.support_.tolist() == [1, 4]
        alone = FederatedSparseRegressor(2, keep=[3], rounds=3, fit_intercept=False)
        assert 3 in alone.fit(rows, y, groups=clients).support_  # here it is the intercept


def test_a_kept_column_of_zeros_is_said_to_be_absent_without_an_intercept_too() -> None:
    x, y, clients = _data()
    x[:, 3] = 0.0
    model = FederatedSparseRegressor(2, keep=[3], rounds=3, fit_intercept=False)
    for rows in (x, sp.csr_matrix(x)):
        with pytest.warns(UserWarning, match="feature 3, which is zero in every row: it gets"):
            model.fit(rows, y, groups=clients)
        assert model.support_.tolist() == [1, 4]


def test_a_kept_column_of_sites_vanishes_when_clients_are_centred() -> None:
    x, y, clients = _data()
    x[:, 3] = clients / 3
    model = FederatedSparseRegressor(2, keep=[3], rounds=3, center="client")
    with pytest.warns(UserWarning, match="in every client"):
        model.fit(x, y, groups=clients)
    assert model.support_.tolist() == [1, 4]
    assert 3 in FederatedSparseRegressor(2, keep=[3], rounds=3).fit(x, y, groups=clients).support_


def test_more_folds_than_clients_are_said_aloud() -> None:
    x, y, clients = _data()
    model = FederatedSparseRegressorCV([1, 2], cv=5, estimator=FederatedSparseRegressor(rounds=2))
    with pytest.warns(UserWarning, match="cv=5, but there are 4 sites"):
        model.fit(x, y, groups=clients)
    assert model.error_path_.shape == (2, 4)
    with pytest.raises(ValueError, match="estimator must be a FederatedSparseRegressor"):
        FederatedSparseRegressorCV([1], estimator=3).fit(x, y, groups=clients)


def test_folds_of_rows_without_weight_are_left_out() -> None:
    x, y, clients = _data()
    y = np.where(clients == 3, 1e3 * x[:, 7], y)  # another law, which must not count
    weight = np.where(clients == 3, 0.0, 1.0)
    base = FederatedSparseRegressor(rounds=2)
    model = FederatedSparseRegressorCV([1, 2], cv=4, estimator=base)
    model.fit(x, y, groups=clients, sample_weight=weight)
    there = clients != 3
    absent = FederatedSparseRegressorCV([1, 2], cv=3, estimator=base)
    absent.fit(x[there], y[there], groups=clients[there])
    np.testing.assert_allclose(np.sort(model.error_path_), np.sort(absent.error_path_), rtol=1e-9)
    alone = np.where(clients == 0, 1.0, 0.0)
    with pytest.raises(ValueError, match="no fold has rows with a positive sample_weight"):
        model.fit(x, y, groups=clients, sample_weight=alone)


def test_a_csr_matrix_far_from_zero_is_said_to_harm_the_selection() -> None:
    x, y, clients = _data(offset=100.0)
    with pytest.warns(UserWarning, match="CSR matrix is not centred, and 9 of its columns"):
        FederatedSparseRegressor(2, rounds=4, solver="fedht").fit(sp.csr_matrix(x), y, clients)
    with pytest.warns(UserWarning, match="CSR matrix is not centred"):
        FederatedSparseClassifier(2, rounds=2, solver="fedht", l2=0.1).fit(
            sp.csr_matrix(x), y > np.median(y), clients
        )
    dense = FederatedSparseRegressor(2, rounds=4, solver="fedht").fit(x, y, groups=clients)
    assert dense.support_.tolist() == [1, 4]
    # without an intercept nothing is centred anyway; what is near zero is not spoken of
    FederatedSparseRegressor(2, rounds=1, solver="fedht", fit_intercept=False).fit(
        sp.csr_matrix(x), y, clients
    )
    near, target, _ = _data()
    FederatedSparseRegressor(2, rounds=4).fit(sp.csr_matrix(near), target, groups=clients)


def _hospitals(rows: int = 400) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    x, hospital = draw.normal(size=(rows, 20)), draw.integers(0, 4, rows)
    return x, 2 * x[:, 3] - 1.5 * x[:, 8] + 0.1 * draw.normal(size=rows), hospital


@pytest.mark.parametrize("solver", ["fedgradmp", "fedht", "distributediht"])
def test_weights_count_as_repeated_rows_do(solver: str) -> None:
    x, y, hospital = _hospitals()
    weight = np.where(hospital == 0, 30, 1)
    y = np.where(hospital == 0, 3 * x[:, 5], y)
    model = FederatedSparseRegressor(1, rounds=20, solver=solver, random_state=0)
    told = clone(model).fit(x, y, hospital, sample_weight=weight)
    rows = np.repeat(np.arange(len(y)), weight)
    repeated = clone(model).fit(x[rows], y[rows], hospital[rows])
    assert told.support_.tolist() == repeated.support_.tolist() == [5]
    assert np.allclose(told.coef_, repeated.coef_)


def test_a_column_of_dates_is_no_constant() -> None:
    x, y, hospital = _hospitals()
    moved = x.copy()
    moved[:, 3] = 1.7e9 + 1e3 * x[:, 3]
    model = FederatedSparseRegressor(2, rounds=20, random_state=0)
    model.fit(moved, y, hospital)
    assert model.score(moved, y) > 0.99
    assert model.support_.tolist() == [3, 8]


@pytest.mark.parametrize("solver", ["fedgradmp", "inexactfedgradmp"])
def test_atoms_may_repeat(solver: str) -> None:
    x, y, hospital = _hospitals()
    model = FederatedSparseRegressor(2, rounds=5, dictionary=np.c_[np.eye(20), np.eye(20)])
    model.set_params(solver=solver).fit(x, y, hospital)
    # both places may go to one feature, which has two atoms: no worse than the best one alone
    alone = max(np.corrcoef(column, y)[0, 1] ** 2 for column in x.T)
    assert model.score(x, y) > alone - 0.01


@pytest.mark.parametrize("names", [[1, "1"], [1, "b"], [np.nan, "b"], [None, "b"]])
def test_a_list_that_mixes_text_and_numbers_is_refused(names: list[Any]) -> None:
    x, y, _ = _hospitals()
    with pytest.raises(ValueError, match="groups"):
        FederatedSparseRegressor(2).fit(x, y, names * 200)


def test_settings_that_would_do_nothing_are_refused() -> None:
    x, y, hospital = _hospitals()
    with pytest.raises(ConfigError, match="local_steps"):
        FederatedSparseRegressor(2, local_steps=0).fit(x, y, hospital)
    with pytest.raises(ValueError, match="fit_intercept"):
        FederatedSparseRegressor(2, center="client", fit_intercept=False).fit(x, y, hospital)
    with pytest.raises(ConfigError, match="dictionary"):
        stability_selection(FederatedSparseRegressor(2, dictionary=np.eye(20)), x, y, hospital)


def test_folds_may_be_a_number_of_numpy() -> None:
    x, y, hospital = _hospitals()
    base = FederatedSparseRegressor(rounds=2, random_state=0)
    found = [
        FederatedSparseRegressorCV([1, 2], cv=cv, estimator=base).fit(x, y, hospital).error_path_
        for cv in (2, np.int64(2))
    ]
    assert np.array_equal(found[0], found[1])


# ---------------------------------------------------------------------- no groups
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (FederatedSparseRegressor(2, solver="fedgradmp"), "averages the models of sites"),
        (FederatedSparseCox(2), "its own baseline hazard"),
        (FederatedSparseRegressor(2, center="client"), "its own intercept"),
        (FederatedSparseRegressor(2, site_variances=True), "its own variance"),
    ],
    ids=["fedgradmp", "cox", "center", "variances"],
)
def test_rows_without_groups_are_reported_where_sites_matter(model: Any, why: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((60, 6))
    y = np.exp(x[:, 1] + 0.1 * draw.standard_normal(60))
    with pytest.warns(ParsiflWarning, match=f"groups=None: .*{why}.*Pass groups"):
        model.fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, groups=np.zeros(60))


def test_rows_without_groups_are_no_matter_for_the_lossless_solver() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((60, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FederatedSparseRegressor(2).fit(x, x[:, 1] + draw.standard_normal(60))
