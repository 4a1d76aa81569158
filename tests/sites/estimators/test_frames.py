"""Estimators on tables: words, missing values, names, export and saving."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.utils.validation import check_is_fitted

from parsifl.core.errors import DataError, ParsiflWarning
from parsifl.data.table_encoding import RARE, Preprocessing, summarise
from parsifl.data.tables import as_columns
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseClassifierCV,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
    load,
    post_double_selection,
    save,
    split_inference,
    stability_selection,
)
from parsifl.sites.estimators import saved
from parsifl.sites.estimators.export import as_sklearn

ROWS = 300
SITE = np.arange(ROWS) % 3


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    found = pd.DataFrame(
        {
            "age": draw.normal(60, 10, ROWS),
            "ward": draw.choice(["ICU", "general", "surgery"], ROWS, p=[0.1, 0.6, 0.3]),
            "sex": draw.choice(["f", "m"], ROWS),
            "marker": draw.normal(size=ROWS),
            "smoker": draw.random(ROWS) < 0.3,
        }
    )
    found.loc[::20, "age"] = np.nan
    found.loc[5::25, "ward"] = None
    return found


def risk(table: pd.DataFrame) -> Any:
    noise = np.random.default_rng(1).normal(size=ROWS)
    level = 2.0 * (table.ward == "surgery") - 1.0 * (table.ward == "ICU")
    return 0.1 * table.age.fillna(60) + level + noise


def fits() -> list[tuple[Any, Any]]:
    u = risk(frame()).to_numpy()
    return [
        (FederatedSparseRegressor(2), u),
        (FederatedSparseClassifier(2), np.where(u > np.median(u), "ill", "well")),
        (FederatedSparsePoisson(2), np.round(np.exp(u / 4))),
        (FederatedSparseCox(2), np.exp(u)),
    ]


def as_polars(table: pd.DataFrame) -> pl.DataFrame:
    return pl.DataFrame(
        {name: [None if pd.isna(v) else v for v in table[name].tolist()] for name in table}
    )


NAMES = [type(model).__name__ for model, _ in fits()]


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_a_table_of_pandas_or_polars_is_fitted_as_its_design_matrix(case: int) -> None:
    model, y = fits()[case]
    model.fit(frame(), y, SITE)
    assert model.feature_names_in_.tolist() == ["age", "ward", "sex", "marker", "smoker"]
    assert model.n_features_in_ == 5
    names = ["age", "ward=ICU", "ward=surgery", "ward=(missing)", "sex=f", "marker", "smoker"]
    found = model.get_feature_names_out().tolist()
    assert found == (names if found[4] == "sex=f" else [*names[:4], "sex=m", *names[5:]])
    assert model.support_.tolist() == [0, 1, 2, 3]  # the factor enters as a whole
    other = fits()[case][0].fit(as_polars(frame()), y, SITE)
    assert np.array_equal(other.coef_, model.coef_)
    design = model.preprocessing_.design(as_columns(frame()))
    plain = fits()[case][0].set_params(column_groups=[0, 1, 1, 1, 2, 3, 4])
    assert np.allclose(plain.fit(design, y, SITE).coef_, model.coef_, rtol=1e-9, atol=1e-12)
    assert model.bytes_up_ > plain.bytes_up_  # the agreement is in the books
    assert "ward=surgery" in str(model.summary())


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_new_rows_may_have_other_orders_levels_and_missing_values(case: int) -> None:
    model, y = fits()[case]
    model.fit(frame(), y, SITE)
    assert np.array_equal(model.predict(frame()), model.predict(frame().iloc[:, ::-1]))
    assert np.array_equal(model.predict(frame()), model.predict(as_polars(frame())))
    new = frame().head(3).assign(ward=["isolation", None, "ICU"], sex=["m", None, "f"], note="x")
    with pytest.warns(ParsiflWarning, match="level.* that no site had") as caught:
        found = model.predict(new)
    assert len(caught) == 2
    usual = model.preprocessing_.columns[2].levels[0]
    known = new.assign(ward=["general", None, "ICU"], sex=["m", usual, "f"])
    assert np.array_equal(found, model.predict(known))
    with pytest.raises(DataError, match="lacks 1 column: age"):
        model.predict(frame().drop(columns="age"))
    with pytest.raises(ValueError, match="fitted to a table with words"):
        model.predict(np.zeros((2, 5)))


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_the_export_to_scikit_learn_predicts_the_same(case: int) -> None:
    model, y = fits()[case]
    model.fit(frame(), y, SITE)
    exported = model.to_sklearn()
    check_is_fitted(exported)
    new = frame().assign(ward=["isolation", None, "ICU"] * 100)
    kind = "predict_proba" if hasattr(model, "predict_proba") else "predict"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the unknown level
        assert np.allclose(getattr(exported, kind)(new), getattr(model, kind)(new), rtol=1e-12)
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    plain, _ = fits()[case]
    plain.fit(x, y, SITE)
    assert np.allclose(getattr(plain.to_sklearn(), kind)(x), getattr(plain, kind)(x), rtol=1e-12)


def test_the_export_keeps_merged_levels() -> None:
    model = FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE)
    merged = frame().assign(ward=lambda t: t.ward.replace("ICU", RARE))
    model.preprocessing_ = Preprocessing.of([summarise(as_columns(merged))])
    new = frame().head(4).assign(ward=["isolation", "surgery", RARE, "general"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the unknown level
        assert np.allclose(as_sklearn(model, "nan").predict(new), model.predict(new), rtol=1e-12)


@pytest.mark.parametrize("case", range(4), ids=NAMES)
def test_a_saved_estimator_comes_back(case: int, tmp_path: Path) -> None:
    model, y = fits()[case]
    model.fit(frame(), y, SITE)
    save(model, tmp_path / "model.json")
    found = load(tmp_path / "model.json")
    assert type(found) is type(model)
    assert found.get_params() == model.get_params()
    assert np.array_equal(found.coef_, model.coef_)
    assert np.array_equal(found.predict(frame()), model.predict(frame()))
    assert str(found.summary()) == str(model.summary())
    assert found.certificate_.reason == model.certificate_.reason
    readable = json.loads((tmp_path / "model.json").read_text())["summary"]
    assert readable["table"][0][:3] == ["", "estimate", "SE"]
    assert "300 observations at 3 sites" in readable["methods"]


def _with_state(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    state = {**values["state"]["mapping"], name: value}
    return {**values, "state": {"mapping": state}}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"estimator": "Popen"},
        {"state": {"mapping": {}}},
        {"state": {"part": "os.system", "fields": {}}},
        {"params": {"mapping": {"nonsense": 1}}},
        *(
            lambda values, name=name, value=value: _with_state(values, name, value)
            for name, value in [
                ("intercept_", math.nan),
                ("intercept_", math.inf),
                ("coef_", {"array": "<f8", "shape": [1], "values": [math.nan]}),
                ("clients_", {"array": "<U200000000", "shape": [1], "values": ["a"]}),
                ("support_", {"array": "<i8", "shape": [1], "values": [math.inf]}),
                ("predict", 1),
                ("fit", 1),
                ("__class__", 1),
                ("_other", 1),
            ]
        ),
    ],
)
def test_a_file_that_is_no_estimator_is_an_error(change: Any, tmp_path: Path) -> None:
    save(FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE), tmp_path / "model.json")
    values = json.loads((tmp_path / "model.json").read_text())
    values = change(values) if callable(change) else {**values, **change}
    signed = {**values, "sha256": saved._digest(values)}
    (tmp_path / "model.json").write_text(json.dumps(signed))
    with pytest.raises(DataError, match=r"model\.json"):
        load(tmp_path / "model.json")


def test_a_saved_estimator_that_was_changed_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    save(FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE), file)
    file.write_text(file.read_text().replace('"age"', '"agf"'))
    with pytest.raises(DataError, match="its checksum does not match"):
        load(file)


def test_saving_replaces_estimators_and_nothing_else(tmp_path: Path) -> None:
    model = FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE)
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    with pytest.raises(DataError, match=r"notes\.txt is not a saved estimator"):
        save(model, notes)
    assert notes.read_text() == "precious"
    for _ in range(2):
        save(model, tmp_path / "model.json")
    for missing in (tmp_path, tmp_path / "nowhere" / "model.json"):
        with pytest.raises(DataError, match=r"cannot be (read|written)"):
            save(model, missing)
        with pytest.raises(DataError, match="cannot be read"):
            load(missing)


@pytest.mark.parametrize(("weight", "said"), [(0.0, "zero"), (-1.0, "negative")])
def test_weights_of_a_table_are_checked_first(weight: float, said: str) -> None:
    weights = np.full(len(frame()), weight)
    with pytest.raises(ValueError, match=said):
        FederatedSparseRegressor(2).fit(frame(), risk(frame()), SITE, sample_weight=weights)


def test_kept_columns_are_named() -> None:
    model = FederatedSparseRegressor(0, keep=["ward", "age"]).fit(frame(), risk(frame()), SITE)
    assert model.support_.tolist() == [0, 1, 2, 3]
    assert np.isfinite(model.summary().se).all()
    positions = FederatedSparseRegressor(0, keep=[0, 1]).fit(frame(), risk(frame()), SITE)
    assert np.array_equal(positions.coef_, model.coef_)


def test_another_unit_at_a_site_is_a_warning() -> None:
    table = frame()
    table.loc[SITE == 1, "age"] *= 12
    with pytest.warns(ParsiflWarning, match=r"column 'age': site 1 has mean.*check its unit"):
        FederatedSparseRegressor(2).fit(table, risk(frame()), SITE)


def test_rows_without_weight_do_not_shape_the_preprocessing() -> None:
    table, y = frame(), risk(frame())
    weight = np.ones(ROWS)
    weight[:30] = 0.0
    table.loc[:29, "ward"] = "isolation"
    model = FederatedSparseRegressor(2)
    with pytest.warns(ParsiflWarning, match="isolation"):
        model.fit(table, y, SITE, sample_weight=weight)
    alone = FederatedSparseRegressor(2).fit(table[30:], y[30:], SITE[30:])
    assert np.allclose(model.coef_, alone.coef_, rtol=1e-10)


def test_a_code_among_numbers_is_a_warning() -> None:
    draw = np.random.default_rng(0)
    crp = draw.normal(5, 1, 60).round(1)
    table = pd.DataFrame({"crp": [*crp[:-1].astype(str), "<0.3"], "icd": ["10", "20", "E75"] * 20})
    with pytest.warns(UserWarning, match="column 'crp' is treated as words.*'<0.3'") as caught:
        FederatedSparseRegressor(1).fit(table, crp, np.arange(60) % 3)
    assert len(caught) == 1


def test_a_mixed_column_is_named() -> None:
    table = frame().assign(age=lambda t: t.age.astype(object).where(t.index != 3, "<40"))
    with pytest.raises(DataError, match="column 'age': not all values are numbers"):
        FederatedSparseRegressor(2).fit(table, risk(frame()), SITE)


def test_inference_names_the_columns_of_a_table() -> None:
    table, y = frame(), risk(frame())
    split = split_inference(FederatedSparseRegressor(2), table, y, SITE)
    assert split.names[:3] == ["(intercept)", "age", "ward=ICU"]
    assert split.lower[1] < 0.1 < split.upper[1]
    table["age"] = table.age.fillna(60)
    double = post_double_selection(FederatedSparseRegressor(2), table, y, SITE, exposure="age")
    assert double.names == ["age"]
    assert double.lower[0] < 0.1 < double.upper[0]
    with pytest.raises(ValueError, match="exposure must be a column of X"):
        post_double_selection(FederatedSparseRegressor(2), table, y, SITE, exposure="weight")
    stable = stability_selection(
        FederatedSparseRegressor(2), table, y, SITE, subsamples=5, by="rows"
    )
    assert [stable.names[place] for place in stable.support] == ["age", "ward"]


def odd(change: str) -> pd.DataFrame:
    table = frame()
    if change == "a level at one site":
        table.loc[SITE == 2, "ward"] = "isolation"
    elif change == "constants":
        table = table.assign(constant=3.0, word="same", site=SITE.astype(float))
    elif change == "missing at a site":
        table.loc[SITE == 1, "age"] = np.nan
    elif change == "codes":
        table["marker"] = table.marker.astype(object).where(table.index != 3, "NA")
    return table


@pytest.mark.parametrize(
    "change", ["a level at one site", "constants", "missing at a site", "codes"]
)
def test_awkward_tables_are_taken(change: str) -> None:
    table = odd(change)
    model = FederatedSparseRegressor(3).fit(table, risk(frame()), SITE)
    coefficients = dict(zip(model.get_feature_names_out(), model.coef_, strict=True))
    assert np.isfinite(model.coef_).all()
    assert coefficients.get("constant", 0.0) == 0.0
    assert not any(name.startswith("word=") for name in coefficients)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (frame().assign(age=np.nan), "the column 'age' is empty at every site"),
        (frame().iloc[:0], "X has 0 rows"),
        (pd.concat([frame(), frame()[["age"]]], axis=1), "more than one column 'age'"),
    ],
)
def test_impossible_tables_are_named(table: pd.DataFrame, reason: str) -> None:
    with pytest.raises((ValueError, DataError), match=reason):
        FederatedSparseRegressor(1).fit(table, risk(frame())[: len(table)])


LABELS = ["yes", "no"] * 12
MISSING_TARGETS = {
    "None": np.array([*LABELS[:-1], None], dtype=object),
    "NaN among text": np.array([*LABELS[:-1], np.nan], dtype=object),
    "list": [*LABELS[:-1], None],
    "string": pd.Series([*LABELS[:-1], None], dtype="string"),
    "category": pd.Series([*LABELS[:-1], None], dtype="category"),
    "boolean": pd.Series([True, False] * 11 + [True, None], dtype="boolean"),
    "Int64": pd.Series([1, 0] * 11 + [1, None], dtype="Int64"),
    "float": np.array([1.0, 0.0] * 11 + [1.0, np.nan]),
}


@pytest.mark.parametrize("y", MISSING_TARGETS.values(), ids=MISSING_TARGETS)
def test_missing_labels_are_counted(y: Any) -> None:
    table, sites = frame().head(24), np.arange(24) % 2
    path = FederatedSparseClassifierCV([1], cv=2)
    for model in (FederatedSparseClassifier(1), path, FederatedSparseRegressor(1)):
        with pytest.raises(ValueError, match=r"y is missing in 1 of 24 rows .* row 23\)"):
            model.fit(table, y, groups=sites)


def test_text_is_no_target_of_a_regression() -> None:
    table, sites = frame().head(24), np.arange(24) % 2
    for kind in (FederatedSparseRegressor, FederatedSparsePoisson, FederatedSparseCox):
        with pytest.raises(ValueError, match="y must hold numbers, but has 'yes' in row 0"):
            kind(1).fit(table, LABELS, groups=sites)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.ones((24, 3)), r"y needs two columns.* got shape \(24, 3\)"),
        (np.array([[1.0, 1.0], [2.0, 2.0]] * 12), "must be 0 or 1, got 2"),
        (np.array([[1.0, 1.0], [-2.0, 0.0]] * 12), "got -2; times must not be negative"),
    ],
)
def test_a_survival_target_of_another_form_is_described(y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedSparseCox(1).fit(frame().head(24), y, groups=np.arange(24) % 2)


def test_a_column_name_is_no_groups() -> None:
    with pytest.raises(ValueError, match="got 'ward'; pass the values of a column"):
        FederatedSparseRegressor(1).fit(frame(), risk(frame()), groups="ward")


def test_the_methods_text_names_fixed_terms_only_if_there_are_any() -> None:
    x = np.random.default_rng(0).normal(size=(40, 5))
    free = FederatedSparseRegressor(1).fit(x, x[:, 0], np.arange(40) % 2)
    assert "allowed 1 of 5 terms; the terms" in free.methods_text()
    some = FederatedSparseRegressor(1, keep=[2]).fit(x, x[:, 0], np.arange(40) % 2)
    assert "allowed 1 of 4 terms, on top of those that were fixed; the" in some.methods_text()


def test_more_coefficients_than_rows_are_said_aloud() -> None:
    x = np.random.default_rng(0).normal(size=(12, 40))
    with pytest.warns(UserWarning, match=r"gives 21 coefficients \(including intercepts\) to 12"):
        FederatedSparseRegressor(20).fit(x, x[:, 0], np.arange(12) % 3)


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 4), ({"center": "client"}, 5), ({"fit_intercept": False}, 3)]
)
def test_intercepts_count_towards_an_interpolating_fit(
    settings: dict[str, Any], count: int
) -> None:
    draw = np.random.default_rng(0)
    x, y, sites = draw.normal(size=(count, 6)), draw.normal(size=count), np.arange(count) % 2
    with pytest.warns(UserWarning, match=f"gives {count} coefficients .* to {count} rows"):
        FederatedSparseRegressor(3, **settings).fit(x, y, sites)
