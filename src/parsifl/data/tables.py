"""Tables as typed columns, read from CSV files and from pandas or polars frames.

A column is an array of float64, in which NaN is a missing number, or an array of text, in which an
empty text is a missing word.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parsifl.core.errors import DataError

Column = npt.NDArray[np.float64] | npt.NDArray[np.str_]
Columns = Mapping[str, Column]
MISSING = frozenset({"", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "?"})
"""Texts that mark a missing value in every table."""
_DELIMITERS = ",;\t"
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")


class MixedColumnError(DataError):
    """A column holds numbers and words.

    Attributes
    ----------
    name
        The column.
    rows
        The numbers, from 1, of the rows whose values are not numbers. The error message contains
        neither rows nor values.
    """

    def __init__(self, name: str, rows: Sequence[int]) -> None:
        super().__init__(
            f"column '{name}': not all values are numbers; declare missing codes (missing), or "
            "the column as words (words)"
        )
        self.name, self.rows = name, rows


def read_csv(path: str | Path) -> dict[str, list[str]]:
    """Read a CSV file with a header as columns of text.

    Commas, semicolons and tabs separate values; between semicolons a decimal comma becomes a point.
    The text is UTF-8, with or without a byte order mark, or Latin-1.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "\0" in text:
        raise DataError("the table is not text in UTF-8 or Latin-1; save it as CSV (UTF-8)")
    header = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=header.count)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1:
        raise DataError("the table is empty, or its rows have unequal lengths")
    names = _checked_names([name.strip() for name in rows[0]])
    columns = {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(names)}
    if delimiter == ";":
        return {name: [_with_point(value) for value in values] for name, values in columns.items()}
    return columns


def _with_point(value: str) -> str:
    return value.replace(",", ".") if _DECIMAL_COMMA.fullmatch(value) else value


def _checked_names(names: Sequence[str]) -> Sequence[str]:
    if "" in names:
        raise DataError(f"column {names.index('') + 1} of the table has no name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the table has more than one column '{twice[0][:80]}'; rename them")
    return names


def is_table(x: Any) -> bool:
    """Return whether `x` is a frame with named columns, such as those of pandas and polars.

    >>> is_table(np.eye(2))
    False
    """
    names = list(getattr(x, "columns", ()))
    return bool(names) and all(isinstance(name, str) for name in names)


def as_columns(
    table: Any, missing: Collection[str] = (), words: Collection[str] = ()
) -> dict[str, Column]:
    """Return the typed columns of a frame, or of columns of text by name.

    In a frame the type of a column decides: numbers and truth values are numbers, texts and
    categories are words. A column of a CSV file holds numbers if all of its values do.

    Parameters
    ----------
    missing
        Texts that mark a missing value, besides `MISSING`.
    words
        Columns that hold words although their values look like numbers.

    Examples
    --------
    >>> as_columns({"age": ["30", ""], "ward": ["a", "NA"]})
    {'age': array([30., nan]), 'ward': array(['a', ''], dtype='<U1')}
    """
    frame = is_table(table)
    names = _checked_names([str(name) for name in (table.columns if frame else table)])
    codes = MISSING | set(missing)
    return {
        name: _column(name, table[name], codes, is_text=name in words, frame=frame)
        for name in names
    }


def _column(
    name: str, values: Any, codes: Collection[str], *, is_text: bool, frame: bool
) -> Column:
    array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"column '{name}' must have one dimension, not {array.ndim}")
    is_text = is_text or "categor" in str(getattr(values, "dtype", "")).lower()
    if array.dtype.kind in "biuf" and not is_text:
        return _finite(name, array.astype(np.float64))
    if array.dtype.kind not in "biufUO":
        raise DataError(f"column '{name}' holds {array.dtype}; convert it to numbers or to text")
    texts = [_text(value, codes) for value in array.tolist()]
    there = [value for value in array.tolist() if _text(value, codes)]
    worded = [isinstance(value, str) for value in there]
    if is_text or (frame and there and all(worded)):
        return np.array(texts, dtype=np.str_)
    odd = [row for row, value in enumerate(texts, 1) if value and not _is_number(value)]
    if odd and len(odd) < len(there):
        raise MixedColumnError(name, odd)
    if odd:
        return np.array(texts, dtype=np.str_)
    return np.array([float(value) if value else math.nan for value in texts])


def _finite(name: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if np.isinf(values).any():
        raise DataError(f"column '{name}' contains infinity")
    return values


def _text(value: Any, codes: Collection[str]) -> str:
    """Return a value as text; a missing one is empty."""
    if value is None or type(value).__name__ == "NAType":
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else (str(int(value)) if value.is_integer() else str(value))
    text = str(value).strip()
    return "" if text in codes else text


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
