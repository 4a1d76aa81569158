from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import DataError, WireError
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import AgreeReply, read
from parsifl.flower.tables import Agreement, Prepared, Summary, read_csv, summarise

ONE = {"age": ["30", "", "50"], "ward": ["b", "a", "NA"], "y": ["1", "2", "3"]}
TWO = {"age": ["40", "60"], "ward": ["c", "c"], "y": ["4", "6"]}


def summary(table: dict[str, list[str]], *words: str) -> Summary:
    return summarise(Prepared(table, "y", frozenset(words)))


def agreement() -> Agreement:
    return Agreement.of([summary(ONE, "ward"), summary(TWO, "ward")], "y")


def test_columns_levels_and_missing_values_are_agreed() -> None:
    found = agreement()
    assert found.names == ["age", "ward=b", "ward=c", "ward=(missing)"]
    assert found.rows == 5
    assert found.target_mean == pytest.approx(16 / 5)
    assert found.columns[0].mean[0] == pytest.approx(45)


def test_all_sites_together_are_centred_and_scaled() -> None:
    found = agreement()
    parts = [found.encode(table) for table in (ONE, TWO)]
    x, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    pooled = np.array([30, 45, 50, 40, 60.0])  # the missing age is the mean of the others
    assert np.allclose(x[:, 0], (pooled - pooled.mean()) / pooled.std())
    assert np.allclose(x.mean(axis=0), 0)
    assert np.allclose(x.std(axis=0), 1)
    assert np.allclose(y, np.array([1, 2, 3, 4, 6]) - 3.2)


def test_coefficients_return_to_the_units_of_the_tables() -> None:
    found = agreement()
    slopes = np.array([1.0, -2.0, 0.5, 3.0])
    coef, intercept = found.original(slopes)
    x, _ = found.encode(ONE)
    raw = np.array([[30, 1, 0, 0], [45, 0, 0, 0], [50, 0, 0, 1.0]])
    assert np.allclose(raw @ coef + intercept, x @ slopes + found.target_mean)


def test_an_agreement_survives_json_bit_for_bit() -> None:
    found = agreement()
    assert Agreement.read(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(WireError, match="agreement"):
        Agreement.read({"columns": 3})


def test_a_summary_holds_no_row() -> None:
    told = summary({"x": [str(i / 7) for i in range(1000)], "y": ["0"] * 1000})
    assert len(AgreeReply(client=0, summary=told).envelope().text) < 280


@pytest.mark.parametrize(
    ("other", "words", "reason"),
    [
        ({"age": ["1"], "y": ["1"]}, "", "differ in 1 columns, such as ward"),
        ({"age": ["1"], "ward": ["7"], "y": ["1"]}, "", "words at some sites"),
        ({"age": ["1"], "ward": ["7"], "y": ["low"]}, "y", "must hold numbers at every site"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    other: dict[str, list[str]], words: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        Agreement.of([summary(ONE, "ward"), summary(other, words)], "y")


def test_rare_levels_come_last_and_stand_for_unknown_ones() -> None:
    merged = {**ONE, "ward": ["(rare)", "a", "b"]}
    found = Agreement.of([summary(merged, "ward"), summary(TWO, "ward")], "y")
    assert found.names == ["age", "ward=b", "ward=c", "ward=(rare)"]
    new = {"age": ["30"], "ward": ["x"], "y": ["0"]}
    known = {"age": ["30"], "ward": ["(rare)"], "y": ["0"]}
    assert np.array_equal(found.encode(new)[0], found.encode(known)[0])
    with pytest.raises(DataError, match="a level that no site has; known: a, b, c"):
        agreement().encode(new)


def test_a_column_of_one_level_has_no_indicator() -> None:
    found = Agreement.of(
        [summary({"ward": ["a", "a"], "age": ["1", "2"], "y": ["1", "2"]}, "ward")], "y"
    )
    assert found.names == ["age"]
    assert found.encode({"ward": ["a"], "age": ["1"], "y": ["1"]})[0].shape == (1, 1)


@pytest.mark.parametrize(
    "column",
    [
        {"count": 9, "sum": 1.0, "squares": 1.0},
        {"count": 1, "sum": float("nan"), "squares": 1.0},
        {"count": 1, "sum": 1.0},
        {"levels": {"a": 1}, "missing": 0},
        {"levels": {"(missing)": 3}, "missing": 0},
        {"levels": {"a": -1, "b": 4}, "missing": 0},
        {"levels": {"a" * 300: 3}, "missing": 0},
        7,
    ],
)
def test_forged_summaries_are_refused(column: Any) -> None:
    told = json.loads(AgreeReply(client=0, summary=summary(ONE, "ward")).envelope().text)
    told["summary"]["columns"]["age"] = column
    with pytest.raises(WireError, match=r"summary.*age"):
        read(AgreeReply, Envelope(json.dumps(told)))


def test_a_file_is_read_as_columns_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,ward\n 30 ,b\n,a\n")
    assert read_csv(tmp_path / "a.csv") == {"age": ["30", ""], "ward": ["b", "a"]}
    (tmp_path / "b.csv").write_text("age,ward\n30\n")
    with pytest.raises(DataError, match="unequal lengths"):
        read_csv(tmp_path / "b.csv")
