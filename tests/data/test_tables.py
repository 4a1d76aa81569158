"""Tables as typed columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from parsifl.core.errors import DataError
from parsifl.data.tables import MixedColumnError, as_columns, is_table, read_csv


@pytest.mark.parametrize(
    "data",
    [
        b"age,ward\n 30.5 ,b\n,K\xc3\xb6ln\n",
        b"\xef\xbb\xbfage,ward\r\n30.5,b\r\n,K\xc3\xb6ln\r\n",
        b"age;ward\n30,5;b\n;K\xc3\xb6ln\n",
        b" age , ward \n30.5,b\n,K\xf6ln\n",
        b'"age"\tward\n30.5\tb\n\t"K\xc3\xb6ln"\n\n',
    ],
    ids=["plain", "byte order mark", "semicolons", "latin-1 and spaces", "tabs and quotes"],
)
def test_a_file_is_read_as_columns_of_text(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    assert read_csv(tmp_path / "a.csv") == {"age": ["30.5", ""], "ward": ["b", "Köln"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("age,ward\n30\n", "unequal lengths"),
        ("age,ward\n", "is empty"),
        ("age,ward, age\n30,a,3\n", "more than one column 'age'"),
        (",age\n1,30\n", "column 1 of the table has no name"),
        ("age\0\n1\n", "not text in UTF-8"),
    ],
)
def test_files_that_cannot_be_read_are_errors(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_csv(tmp_path / "a.csv")


def test_text_is_numbers_if_all_of_it_is() -> None:
    found = as_columns({"a": ["1", "NA", "2.5"], "b": ["x", "", "1"]}, words=("b",))
    assert np.array_equal(found["a"], [1.0, np.nan, 2.5], equal_nan=True)
    assert found["b"].tolist() == ["x", "", "1"]
    with pytest.raises(MixedColumnError, match="column 'b'") as error:
        as_columns({"b": ["x", "", "1"]})
    assert error.value.rows == [1]
    assert "x" not in str(error.value).replace("'b'", "")
    assert as_columns({"b": ["x", "", "1"]}, missing=("x",))["b"].dtype == np.float64


FRAMES = [
    pd.DataFrame(
        {
            "number": [1.0, np.nan, 3.0],
            "whole": pd.array([1, None, 3], dtype="Int64"),
            "truth": [True, False, True],
            "word": ["a", None, "7"],
            "level": pd.Categorical([1, 2, 1]),
        }
    ),
    pl.DataFrame(
        {
            "number": [1.0, None, 3.0],
            "whole": [1, None, 3],
            "truth": [True, False, True],
            "word": ["a", None, "7"],
            "level": pl.Series(["1", "2", "1"], dtype=pl.Categorical),
        }
    ),
]


@pytest.mark.parametrize("frame", FRAMES, ids=["pandas", "polars"])
def test_the_types_of_a_frame_decide(frame: Any) -> None:
    assert is_table(frame)
    found = as_columns(frame)
    assert np.array_equal(found["number"], [1.0, np.nan, 3.0], equal_nan=True)
    assert np.array_equal(found["whole"], [1.0, np.nan, 3.0], equal_nan=True)
    assert found["truth"].tolist() == [1.0, 0.0, 1.0]
    assert found["word"].tolist() == ["a", "", "7"]
    assert found["level"].tolist() == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "column 'x' holds datetime64"),
        ([np.inf], "column 'x' contains infinity"),
    ],
)
def test_columns_that_are_neither_are_errors(values: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        as_columns(pd.DataFrame({"x": values}))


def test_a_frame_without_names_is_no_table() -> None:
    assert not is_table(pd.DataFrame(np.eye(2)))
