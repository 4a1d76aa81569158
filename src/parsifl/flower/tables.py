"""Tables at several sites made into one design matrix, agreed on from counts and sums alone."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from parsifl.core.errors import DataError, WireError

Table = Mapping[str, Sequence[str]]
Array = npt.NDArray[np.float64]
MISSING = ("", "NA", "NaN", "nan", "null", "?")
RARE, ABSENT = "(rare)", "(missing)"
"""Levels for merged rare levels and for missing values; no value may be equal to them."""
_MOST_COLUMNS, MOST_LEVELS, LONGEST = 100_000, 1000, 200


def read_csv(path: str | Path) -> dict[str, list[str]]:
    """Read a CSV file with a header as columns of text."""
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        names = list(reader.fieldnames or [])
    if not rows or any(None in row or None in row.values() for row in rows):
        raise DataError("the table is empty, or its rows have unequal lengths")
    return {name: [row[name].strip() for row in rows] for name in names}


def present(values: Sequence[str]) -> list[str]:
    """Return the values that are not missing."""
    return [value for value in values if value not in MISSING]


@final
@dataclass(frozen=True)
class Prepared:
    """A site's table, ready to be summed up: kinds are known, missing and rare values are marked.

    Attributes
    ----------
    table
        Columns of text; a missing value is empty.
    target
        The column that is predicted.
    words
        The columns that hold words; all others hold numbers.
    """

    table: Table
    target: str
    words: frozenset[str] = frozenset()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.table[self.target])

    def levels(self, name: str) -> set[str]:
        """Return the levels of a column that occur, with a marker for missing values."""
        return {ABSENT if value in MISSING else value for value in self.table[name]}

    def observed(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which values of a column are not missing."""
        return np.array([value not in MISSING for value in self.table[name]])

    def numbers(self, name: str) -> Array:
        """Return the values of a column of numbers that are not missing."""
        return np.array([float(value) for value in present(self.table[name])])


def summarise(prepared: Prepared) -> dict[str, Any]:
    """Return the aggregates of a site's table: counts, sums and levels; never a row."""
    columns = {name: _column(name, prepared) for name in prepared.table}
    return {"rows": prepared.rows, "columns": columns}


def _column(name: str, prepared: Prepared) -> dict[str, Any]:
    there = present(prepared.table[name])
    if there and name in prepared.words:
        levels, counts = np.unique(np.array(there), return_counts=True)
        found = {str(k): int(n) for k, n in zip(levels, counts, strict=True)}
        return {"levels": found, "missing": prepared.rows - len(there)}
    numbers = prepared.numbers(name)
    first, second = float(numbers.sum()), float((numbers * numbers).sum())
    return {"count": len(there), "sum": first, "squares": second}


@final
@dataclass(frozen=True)
class Column:
    """One column of the table: a number, or levels of which each but the first has an indicator.

    `mean` and `scale` belong to the number, or to each indicator.
    """

    name: str
    levels: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        """Its columns in the design matrix; a column of a single level has none."""
        return [f"{self.name}={v}" for v in self.levels[1:]] if self.levels else [self.name]


@final
@dataclass(frozen=True)
class Agreement:
    """How every site turns its table into the same columns, centred and scaled."""

    target: str
    target_mean: float
    rows: int
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, summaries: Sequence[Mapping[str, Any]], target: str) -> Agreement:
        """Agree from what the sites told, in the order of their numbers."""
        checked = [_checked(client, summary) for client, summary in enumerate(summaries)]
        first = list(checked[0]["columns"])
        for client, summary in enumerate(checked):
            if set(summary["columns"]) != set(first):
                differ = sorted(set(summary["columns"]) ^ set(first))
                raise DataError(f"client {client} and client 0 differ in the columns {differ}")
        rows = sum(summary["rows"] for summary in checked)
        parts = {name: [s["columns"][name] for s in checked] for name in first}
        if any("levels" in part for part in parts[target]):
            raise DataError(f"the column '{target}' holds words; a number is to be predicted")
        middle = sum(part["sum"] for part in parts[target]) / rows
        names = (name for name in first if name != target)
        columns = tuple(_agreed(name, parts[name], rows) for name in names)
        return cls(target, middle, rows, columns)

    @classmethod
    def read(cls, values: Any) -> Agreement:
        """Read what `to_json` wrote."""
        try:
            columns = tuple(
                Column(
                    str(c["name"]),
                    tuple(str(level) for level in c["levels"]),
                    tuple(float(value) for value in c["mean"]),
                    tuple(float(value) for value in c["scale"]),
                )
                for c in values["columns"]
            )
            middle, rows = float(values["target_mean"]), int(values["rows"])
            return cls(str(values["target"]), middle, rows, columns)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"agreement: {error!r:.80}") from None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @property
    def names(self) -> list[str]:
        """The columns of the design matrix: `age`, or `sex=f` for an indicator."""
        return [name for column in self.columns for name in column.names]

    def encode(self, table: Table) -> tuple[Array, Array]:
        """Return a site's centred and scaled features, and its centred target."""
        parts = [_encoded(column, table[column.name]) for column in self.columns]
        y = np.array([float(value) for value in table[self.target]]) - self.target_mean
        return np.ascontiguousarray(np.concatenate(parts, axis=1)), y

    def original(self, slopes: Array) -> tuple[Array, float]:
        """Return coefficients and intercept in the units of the tables."""
        scale = np.array([value for column in self.columns for value in column.scale])
        mean = np.array([value for column in self.columns for value in column.mean])
        coef = slopes / scale
        return coef, self.target_mean - float(coef @ mean)


def _agreed(name: str, parts: Sequence[Mapping[str, Any]], rows: int) -> Column:
    worded = [part for part in parts if part.get("levels")]
    if not worded:
        return _number(name, [part for part in parts if part.get("count")], rows)
    if any(part.get("count") for part in parts):
        raise DataError(f"the column '{name}' holds words at some sites and numbers at others")
    counts: dict[str, int] = {}
    for part in parts:
        for level, count in part.get("levels", {}).items():
            counts[level] = counts.get(level, 0) + count
    levels = sorted(counts, key=lambda level: (level == RARE, level))
    if sum(counts.values()) < rows:
        counts[ABSENT] = rows - sum(counts.values())
        levels.append(ABSENT)
    shares = [counts[level] / rows for level in levels[1:]]
    spread = tuple(math.sqrt(share * (1 - share)) or 1.0 for share in shares)
    return Column(name, tuple(levels), tuple(shares), spread)


def _number(name: str, parts: Sequence[Mapping[str, Any]], rows: int) -> Column:
    count = sum(part["count"] for part in parts)
    if not count:
        raise DataError(f"the column '{name}' is empty at every site; leave it out")
    mean = sum(part["sum"] for part in parts) / count
    squares = sum(part["squares"] for part in parts)
    # missing values are replaced by the mean: they add nothing to the variance
    variance = (squares - count * mean * mean) / rows
    constant = variance <= 1e-12 * squares / rows
    return Column(name, (), (mean,), (1.0 if constant else math.sqrt(variance),))


def _encoded(column: Column, values: Sequence[str]) -> Array:
    if not column.levels:
        mean = column.mean[0]
        numbers = [mean if value in MISSING else float(value) for value in values]
        return ((np.array(numbers) - mean) / column.scale[0])[:, None]
    place = {level: position for position, level in enumerate(column.levels)}
    codes = [_place(column.name, place, value) for value in values]
    indicators = np.eye(len(column.levels))[codes][:, 1:]
    return np.asarray((indicators - np.array(column.mean)) / np.array(column.scale))


def _place(name: str, place: Mapping[str, int], value: str) -> int:
    level = ABSENT if value in MISSING else value
    if level not in place and RARE not in place:
        raise DataError(f"column '{name}': a level that no site has; known: {', '.join(place)}")
    return place[level] if level in place else place[RARE]


def _checked(client: int, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a summary that came over the network, if it makes sense."""
    rows, columns = summary.get("rows"), summary.get("columns")
    if type(rows) is not int or rows < 1 or not isinstance(columns, dict):
        raise WireError(f"client {client}: its summary has no rows and columns")
    if not 1 < len(columns) <= _MOST_COLUMNS:
        raise WireError(f"client {client}: {len(columns)} columns")
    for name, part in columns.items():
        if not isinstance(part, dict) or len(name) > LONGEST or not _sensible(part, rows):
            raise WireError(f"client {client}: the summary of column {name!r:.80} makes no sense")
    return summary


def _sensible(part: Mapping[str, Any], rows: int) -> bool:
    if part.keys() == {"levels", "missing"}:
        levels = part["levels"]
        if not isinstance(levels, dict) or not 0 < len(levels) <= MOST_LEVELS:
            return False
        counts = [*levels.values(), part["missing"]]
        if ABSENT in levels:
            return False
        fits = all(type(count) is int and count >= 0 for count in counts) and sum(counts) == rows
        return fits and all(len(level) <= LONGEST for level in levels)
    if part.keys() != {"count", "sum", "squares"} or type(part["count"]) is not int:
        return False
    sums = (part["sum"], part["squares"])
    return 0 <= part["count"] <= rows and all(type(s) is float and math.isfinite(s) for s in sums)
