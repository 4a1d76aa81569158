"""What a paper needs: the table, ratios, adjusted p-values, names of classes, and many splits."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from tests.support.regimes import Regime

from parsifl.core.errors import ConfigError
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseClassifierCV,
    FederatedSparseCox,
    FederatedSparseCoxCV,
    FederatedSparsePoisson,
    FederatedSparsePoissonCV,
    FederatedSparseRegressor,
    FederatedSparseRegressorCV,
    load,
    save,
    split_inference,
    stability_selection,
)
from parsifl.sites.inference import aggregated

pd = pytest.importorskip("pandas")
multitest = pytest.importorskip("statsmodels.stats.multitest")

CV: dict[str, Any] = {
    "gaussian": FederatedSparseRegressorCV,
    "binomial": FederatedSparseClassifierCV,
    "poisson": FederatedSparsePoissonCV,
    "cox": FederatedSparseCoxCV,
}


def _sites(family: str) -> Any:
    return Regime(family, sizes=(60,) * 4, features=8, nonzero=3, strength=0.5).draw(1)


def _logistic(**settings: Any) -> tuple[Any, Any]:
    sites = _sites("binomial")
    y = np.where(sites.y > 0, "case", "control")
    model = FederatedSparseClassifier(0, keep=[0, 1, 2], **settings)
    return model.fit(sites.x, y, groups=sites.groups), (sites.x, y)


def test_the_table_becomes_a_frame_csv_and_latex() -> None:
    model, _ = _logistic()
    summary = model.summary()
    frame = summary.to_frame(adjust="holm")
    assert frame.index.tolist() == summary.names
    np.testing.assert_array_equal(frame["estimate"], summary.estimate)
    ratios = summary.to_frame(exponentiate=True)
    np.testing.assert_allclose(ratios["odds ratio"], np.exp(summary.estimate))
    np.testing.assert_allclose(ratios["lower"], np.exp(summary.lower))
    np.testing.assert_allclose(ratios["SE"], summary.se)
    text = io.StringIO(summary.to_csv(adjust="holm"))
    read = pd.read_csv(text, index_col="term", float_precision="round_trip")
    pd.testing.assert_frame_equal(read, frame, check_exact=True)
    latex = summary.to_latex(exponentiate=True, adjust="bh")
    assert latex.count(r"\\") == 5
    assert "odds ratio" in latex
    assert r"95\% CI" in latex


def test_ratios_need_a_logarithm_and_names_are_escaped() -> None:
    sites = _sites("gaussian")
    frame = pd.DataFrame(sites.x[:, :2], columns=["a_b", "c"])
    summary = FederatedSparseRegressor(0, keep=["a_b"]).fit(frame, sites.y).summary()
    assert r"a\_b" in summary.to_latex()
    with pytest.raises(ConfigError, match="not logarithms of ratios"):
        summary.to_frame(exponentiate=True)
    unknown: Any = "sidak"
    with pytest.raises(ConfigError, match="unknown adjust"):
        summary.to_frame(adjust=unknown)


@pytest.mark.parametrize(("method", "theirs"), [("holm", "holm"), ("bh", "fdr_bh")])
def test_adjusted_p_values_are_those_of_statsmodels(method: Any, theirs: str) -> None:
    model, _ = _logistic()
    summary = model.summary()
    expected = multitest.multipletests(summary.pvalue[1:], method=theirs)[1]
    adjusted = summary.adjusted(method)
    np.testing.assert_allclose(adjusted[1:], expected, rtol=1e-12)
    assert np.isnan(adjusted[0])


def test_the_modelled_class_and_the_events_are_named_and_can_be_set() -> None:
    model, (x, y) = _logistic()
    cases = int((y == "case").sum())
    assert f"log odds of control ({240 - cases} rows) against case" in str(model.summary())
    other, _ = _logistic(positive="case")
    assert f"log odds of case ({cases} rows) against control" in str(other.summary())
    assert f"of case against control ({cases} events)" in other.methods_text()
    np.testing.assert_allclose(other.coef_, -model.coef_, rtol=1e-6, atol=1e-9)
    assert (other.predict(x) == model.predict(x)).all()
    assert other.classes_.tolist() == ["control", "case"]
    np.testing.assert_allclose(other.predict_proba(x)[:, 1], model.predict_proba(x)[:, 0])
    exported = other.to_sklearn()
    assert (exported.predict(x) == other.predict(x)).all()
    with pytest.raises(ValueError, match="positive must be one of two classes"):
        _logistic(positive="death")
    survival = _sites("cox")
    cox = FederatedSparseCox(0, keep=[0]).fit(survival.x, survival.y, groups=survival.groups)
    assert f"{int(survival.y[:, 1].sum())} events" in str(cox.summary())


def test_cross_validation_scores_the_class_that_is_modelled() -> None:
    _, (x, y) = _logistic()
    groups = np.arange(240) % 4
    for scoring in ("deviance", "auc"):
        errors = []
        for positive in ("case", "control"):
            base = FederatedSparseClassifier(positive=positive)
            path = FederatedSparseClassifierCV([1, 2], cv=4, estimator=base, scoring=scoring)
            errors.append(path.fit(x, y, groups=groups).mean_error_)
        np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6)


@pytest.mark.parametrize("family", CV)
def test_estimators_with_cross_validation_say_what_a_fit_says(family: str, tmp_path: Any) -> None:
    sites = _sites(family)
    path = CV[family]([1, 3, 8], cv=4).fit(sites.x, sites.y, groups=sites.groups)
    summary = path.summary()
    assert np.isnan(summary.se).all()  # also if the whole model was chosen
    assert "cross-validation" in path.methods_text()
    assert path.information_criteria() == path.best_estimator_.information_criteria()
    assert path.certificate_ == path.best_estimator_.certificate_
    assert hasattr(path.to_sklearn(), "predict")
    save(path.best_estimator_, tmp_path / "model.json")
    assert np.isnan(load(tmp_path / "model.json").summary().se).all()


def test_a_model_whose_size_cross_validation_chose_has_no_intervals() -> None:
    sites = _sites("gaussian")
    path = FederatedSparseRegressorCV([1, 8], cv=4).fit(sites.x, sites.y, groups=sites.groups)
    assert path.n_nonzero_coefs_ == 8
    assert np.isnan(path.summary().se).all()


def test_offsets_reach_splits_cross_validation_and_stability() -> None:
    draw = np.random.default_rng(0)
    x, groups = draw.standard_normal((400, 6)), np.arange(400) % 4
    exposure = np.exp(3 * x[:, 5])  # without the offset, column 5 explains the counts
    y = draw.poisson(exposure * np.exp(0.6 * x[:, 0]))
    offset = np.log(exposure)
    path = FederatedSparsePoissonCV([1], cv=4).fit(x, y, groups=groups, offset=offset)
    assert path.support_.tolist() == [0]
    assert path.mean_error_[0] < 3
    np.testing.assert_array_equal(
        path.predict(x, offset=offset), path.best_estimator_.predict(x, offset=offset)
    )
    split = split_inference(FederatedSparsePoisson(1), x, y, groups, offset=offset)
    assert split.names == ["(intercept)", "x0"]
    stable = stability_selection(
        FederatedSparsePoisson(1), x, y, groups, offset=offset, subsamples=5, by="rows"
    )
    assert stable.support.tolist() == [0]


def test_one_split_takes_estimators_with_cross_validation() -> None:
    sites = _sites("gaussian")
    path = FederatedSparseRegressorCV([1, 2, 3], cv=4, rule="one-se")
    summary = split_inference(path, sites.x, sites.y, sites.groups)
    assert np.isfinite(summary.se).all()
    assert "selected on other rows" in summary.guarantee


def test_many_splits_do_not_depend_on_the_seed_much_and_control_errors() -> None:
    draw = np.random.default_rng(0)
    x, groups = draw.standard_normal((240, 10)), np.arange(240) % 4
    y = 0.8 * x[:, 3] + draw.standard_normal(240)
    found = [
        split_inference(FederatedSparseRegressor(2), x, y, groups, splits=10, seed=seed)
        for seed in (0, 1)
    ]
    for summary in found:
        place = summary.names.index("x3")
        assert summary.pvalue[place] < 1e-3
        assert summary.frequency is not None
        assert summary.frequency[place] == 1
        others = [i for i, name in enumerate(summary.names) if name not in ("(intercept)", "x3")]
        assert (summary.pvalue[others] > 0.05).all()
        assert np.isnan(summary.lower).all()
        assert "10 random splits" in str(summary)
        assert "selected" in summary.to_frame()
    with pytest.raises(ConfigError, match="splits must be"):
        split_inference(FederatedSparseRegressor(2), x, y, groups, splits=0)


def test_aggregated_p_values_are_the_quantile_rule() -> None:
    draw = np.random.default_rng(0)
    for count in (10, 20, 50):
        values = draw.uniform(size=count) ** 3
        grid = np.linspace(0.05, 1, 20_001)
        quantiles = np.quantile(values, grid, method="inverted_cdf")
        expected = min(1.0, (1 - np.log(0.05)) * float((quantiles / grid).min()))
        assert aggregated(values) == pytest.approx(expected, rel=1e-3)


def test_sites_with_one_row_cannot_be_split() -> None:
    sites = _sites("gaussian")
    with pytest.raises(ValueError, match="sites with one row cannot be split"):
        split_inference(FederatedSparseRegressor(1), sites.x, sites.y, np.arange(240))


@pytest.mark.parametrize("dtype", ["object", "category", "string"])
def test_a_pipeline_reads_the_missing_words_of_pandas(dtype: str) -> None:
    draw = np.random.default_rng(0)
    words = pd.Series(draw.choice(["a", "b", "c"], 120)).astype(dtype)
    words[::7] = None if dtype == "object" else pd.NA
    words[3] = np.nan if dtype == "object" else words[3]
    table = pd.DataFrame({"ward": words, "age": draw.normal(60, 9, 120)})
    y = (words == "b").fillna(False).astype(float) + 0.1 * table.age + draw.normal(0, 0.1, 120)
    model = FederatedSparseRegressor(2).fit(table, np.asarray(y, dtype=float))
    exported = model.to_sklearn()
    np.testing.assert_allclose(exported.predict(table), model.predict(table), rtol=1e-10)
    again = pickle.loads(pickle.dumps(exported))
    np.testing.assert_allclose(again.predict(table), model.predict(table), rtol=1e-10)


def test_imputed_columns_are_named() -> None:
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"age": draw.normal(60, 9, 200), "sex": draw.choice(["f", "m"], 200)})
    y = 0.1 * table.age.to_numpy() + draw.normal(0, 1, 200)
    fixed = FederatedSparseRegressor(0, keep=["age"])
    assert "replaced by the mean" not in str(clone(fixed).fit(table, y).summary())
    table.loc[::10, "age"] = np.nan
    assert "replaced by the mean of the column: age (10.0%)" in str(fixed.fit(table, y).summary())
