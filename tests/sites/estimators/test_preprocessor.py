"""The encoding of tables as a transformer with the interface of scikit-learn."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from tests.sites.estimators.test_frames import SITE, frame, risk

from parsifl.core.errors import DataError, ParsiflWarning
from parsifl.sites import FederatedPreprocessor, FederatedSparseRegressor


@pytest.mark.parametrize("standardize", [False, True])
def test_scikit_learn_s_own_checks(standardize: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(FederatedPreprocessor(standardize=standardize), on_fail=None)
    assert not {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}


@pytest.mark.parametrize("output", ["pandas", "polars"])
def test_it_is_the_encoding_of_the_estimators(output: str) -> None:
    encoder = FederatedPreprocessor().set_output(transform=output)
    found = encoder.fit_transform(frame(), groups=SITE)
    model = FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE)
    assert list(found.columns) == model.get_feature_names_out().tolist()
    assert encoder.get_feature_names_out().tolist() == list(found.columns)
    assert encoder.preprocessing_ == model.preprocessing_
    assert (encoder.bytes_up_, encoder.bytes_down_) == model._agreement_bytes
    assert np.allclose(np.asarray(found) @ model.coef_ + model.intercept_, model.predict(frame()))


def test_standard_units_are_those_of_all_sites_together() -> None:
    found = FederatedPreprocessor(standardize=True).fit_transform(frame(), groups=SITE)
    assert np.allclose(found.mean(axis=0), 0, atol=1e-12)
    assert np.allclose(found.std(axis=0), 1)


def test_it_runs_in_a_pipeline_on_columns_in_any_order() -> None:
    pipeline = make_pipeline(FederatedPreprocessor(), LinearRegression())
    pipeline.fit(frame(), risk(frame()))
    assert np.allclose(pipeline.predict(frame()), pipeline.predict(frame().iloc[:, ::-1]))
    with pytest.raises(DataError, match="lacks 1 column: age"):
        pipeline.predict(frame().drop(columns="age"))


def test_units_that_differ_are_reported() -> None:
    table = frame()
    table.loc[np.asarray(SITE) == 1, "age"] *= 12
    with pytest.warns(ParsiflWarning, match="column 'age': site 1"):
        FederatedPreprocessor().fit(table, groups=SITE)
