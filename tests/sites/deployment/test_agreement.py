"""What the sites of a regression agree on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import DataError, WireError
from parsifl.data.table_encoding import Summary, summarise
from parsifl.data.tables import as_columns
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import read
from parsifl.sites.deployment.agreement import Agreement, RegressionSpec
from parsifl.sites.deployment.messages import AgreeReply

ONE = {"age": ["30", "", "50"], "ward": ["b", "a", "NA"], "y": ["1", "2", "3"]}
TWO = {"age": ["40", "60"], "ward": ["c", "c"], "y": ["4", "6"]}
SPEC = RegressionSpec("y")


def summary(table: dict[str, list[str]], *words: str) -> Summary:
    return summarise(as_columns(table, words=words))


def agreement() -> Agreement:
    return Agreement.of([summary(ONE), summary(TWO)], SPEC, 10)


def test_the_target_is_no_feature_and_is_centred() -> None:
    found = agreement()
    assert found.preprocessing.names == ["age", "ward=a", "ward=b", "ward=(missing)"]
    assert found.target_mean == pytest.approx(16 / 5)
    assert np.allclose(found.targets(as_columns(ONE)), [[-2.2, 1], [-1.2, 1], [-0.2, 1]])


def test_classes_are_agreed_and_may_be_absent_at_a_site() -> None:
    spec = RegressionSpec("y", "logistic")
    tables = [{"x": ["1", "2"], "y": labels} for labels in (["no", "yes"], ["no", "no"])]
    found = Agreement.of([summary(table, "y") for table in tables], spec, 10)
    assert found.classes == ("no", "yes")
    assert found.target_mean == 0.25
    assert found.targets(as_columns(tables[0]))[:, 0].tolist() == [0.0, 1.0]
    with pytest.raises(DataError, match="must have two classes, but it has 1"):
        Agreement.of([summary(tables[1], "y")], spec, 10)


def test_an_agreement_survives_json_bit_for_bit() -> None:
    found = agreement()
    assert Agreement.read(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(WireError, match="agreement"):
        Agreement.read({"columns": 3})


def test_a_kept_column_is_kept_with_all_its_levels() -> None:
    summaries = [summary(ONE), summary(TWO)]
    assert Agreement.of(summaries, RegressionSpec("y", keep=("ward",)), 10).kept == (1, 2, 3)
    with pytest.raises(DataError, match="keep names the column 'weight'"):
        _ = Agreement.of(summaries, RegressionSpec("y", keep=("weight",)), 10).kept


@pytest.mark.parametrize(
    "values",
    [{"event": "died"}, {"family": "cox"}, {"exposure": "years"}],
)
def test_a_model_that_contradicts_itself_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"event|exposure"):
        RegressionSpec("y", **values)


@pytest.mark.parametrize(
    ("other", "words", "reason"),
    [
        ({"age": ["1"], "y": ["1"]}, "", "differ in 1 columns, such as ward"),
        ({"age": ["1"], "ward": ["7"], "y": ["low"]}, "y", "must hold numbers at every site"),
        ({"age": ["1"], "ward": ["a"]}, "", "'y' is not in the table of every site"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    other: dict[str, list[str]], words: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        Agreement.of([summary(ONE), summary(other, words)], SPEC, 10)


@pytest.mark.parametrize(
    "column",
    [
        {"count": 9, "sum": 1.0, "squares": 1.0},
        {"count": 1, "sum": float("nan"), "squares": 1.0},
        {"count": 1, "sum": 1.0, "squares": -1.0},
        {"count": 1, "sum": 1.0},
        {"levels": {"a": 1}, "missing": 0},
        {"levels": {"(missing)": 3}, "missing": 0},
        {"levels": {"a": -1, "b": 4}, "missing": 0},
        {"levels": {"a" * 300: 3}, "missing": 0},
        7,
    ],
)
def test_forged_summaries_are_refused(column: Any) -> None:
    sent = AgreeReply(client=0, columns=3, summary=summary(ONE)).envelope().text
    told = json.loads(sent)
    told["summary"]["columns"]["age"] = column
    with pytest.raises(WireError, match=r"summary.*age"):
        read(AgreeReply, Envelope(json.dumps(told)))
