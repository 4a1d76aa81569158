"""Tables at several sites made into one design matrix, agreed on from counts and sums alone."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Lt, MaxLen, MinLen
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from parsifl.core.errors import DataError, WireError

Table = Mapping[str, Sequence[str]]
Array = npt.NDArray[np.float64]
MISSING = ("", "NA", "NaN", "nan", "null", "?")
RARE, ABSENT = "(rare)", "(missing)"
"""Levels for merged rare levels and for missing values; no value may be equal to them."""
MOST_COLUMNS, MOST_LEVELS, LONGEST = 100_000, 1000, 200
_MOST_ROWS, _MOST_AGREED = 1 << 40, 100_000
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Text = Annotated[str, MaxLen(LONGEST)]
Count = Annotated[int, Ge(0), Lt(_MOST_ROWS)]


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


@final
@dataclass(frozen=True)
class NumberSums:
    """A column of numbers at one site: how many there are, their sum and their sum of squares."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    count: Count
    sum: float
    squares: float

    @property
    def rows(self) -> int:
        """The fewest rows of a table with this column."""
        return self.count


def _no_marker(levels: dict[str, int]) -> dict[str, int]:
    if ABSENT in levels:
        raise ValueError(f"{ABSENT} is not a level")
    return levels


@final
@dataclass(frozen=True)
class LevelCounts:
    """A column of words at one site: the rows of every level, and those without one."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    levels: Annotated[dict[Text, Count], MinLen(1), MaxLen(MOST_LEVELS), AfterValidator(_no_marker)]
    missing: Count

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return sum(self.levels.values()) + self.missing


ColumnSummary = NumberSums | LevelCounts


@final
@dataclass(frozen=True)
class Summary:
    """The aggregates of a site's table: counts, sums and levels; never a row."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    rows: Annotated[int, Gt(0), Lt(_MOST_ROWS)]
    columns: Annotated[dict[Text, ColumnSummary], MinLen(2), MaxLen(MOST_COLUMNS)]


def check_counts(summary: Summary) -> Summary:
    """Return a summary; raise ValueError if counts contradict its number of rows."""
    for name, column in summary.columns.items():
        exact = isinstance(column, LevelCounts)
        if column.rows > summary.rows or (exact and column.rows != summary.rows):
            raise ValueError(f"columns.{name[:80]}: counts contradict the number of rows")
    return summary


def summarise(prepared: Prepared) -> Summary:
    """Return the aggregates of a site's table."""
    return Summary(prepared.rows, {name: _column(name, prepared) for name in prepared.table})


def _column(name: str, prepared: Prepared) -> ColumnSummary:
    there = present(prepared.table[name])
    if there and name in prepared.words:
        levels, counts = np.unique(np.array(there), return_counts=True)
        found = {str(k): int(n) for k, n in zip(levels, counts, strict=True)}
        return LevelCounts(found, prepared.rows - len(there))
    numbers = prepared.numbers(name)
    return NumberSums(len(there), float(numbers.sum()), float((numbers * numbers).sum()))


@final
@dataclass(frozen=True)
class TableColumn:
    """One column of the table: a number, or levels of which each but the first has an indicator.

    `mean` and `scale` belong to the number, or to each indicator.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    name: Text
    levels: Annotated[tuple[Text, ...], MaxLen(_MOST_AGREED)]
    mean: Annotated[tuple[float, ...], MaxLen(_MOST_AGREED)]
    scale: Annotated[tuple[float, ...], MaxLen(_MOST_AGREED)]

    @property
    def names(self) -> list[str]:
        """Its columns in the design matrix; a column of a single level has none."""
        return [f"{self.name}={v}" for v in self.levels[1:]] if self.levels else [self.name]


@final
@dataclass(frozen=True)
class Agreement:
    """How every site turns its table into the same columns, centred and scaled."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    target: Text
    target_mean: float
    rows: Annotated[int, Gt(0), Lt(1 << 60)]
    columns: Annotated[tuple[TableColumn, ...], MaxLen(MOST_COLUMNS)]

    @classmethod
    def of(cls, summaries: Sequence[Summary], target: str) -> Agreement:
        """Agree from the summaries of the sites, in the order of their numbers."""
        first = list(summaries[0].columns)
        for client, summary in enumerate(summaries):
            if set(summary.columns) != set(first):
                differ = sorted(set(summary.columns) ^ set(first))
                raise DataError(
                    f"client {client} and client 0 differ in {len(differ)} columns, such as "
                    f"{', '.join(name[:40] for name in differ[:5])}"
                )
        rows = sum(summary.rows for summary in summaries)
        parts = {name: [s.columns[name] for s in summaries] for name in first}
        sums = [part for part in parts.get(target, []) if isinstance(part, NumberSums)]
        if len(sums) < len(summaries):
            raise DataError(f"the column '{target}' must hold numbers at every site")
        middle = sum(part.sum for part in sums) / rows
        names = (name for name in first if name != target)
        columns = tuple(_agreed(name, parts[name], rows) for name in names)
        return cls(target, middle, rows, columns)

    @classmethod
    def read(cls, values: Any) -> Agreement:
        """Read what `to_json` wrote; raise WireError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"agreement: {type(error).__name__}") from None

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


def _agreed(name: str, parts: Sequence[ColumnSummary], rows: int) -> TableColumn:
    worded = [part for part in parts if isinstance(part, LevelCounts)]
    numbers = [part for part in parts if isinstance(part, NumberSums) and part.count]
    if not worded:
        return _number(name, numbers, rows)
    if numbers:
        raise DataError(f"the column '{name}' holds words at some sites and numbers at others")
    counts: dict[str, int] = {}
    for part in worded:
        for level, count in part.levels.items():
            counts[level] = counts.get(level, 0) + count
    levels = sorted(counts, key=lambda level: (level == RARE, level))
    if sum(counts.values()) < rows:
        counts[ABSENT] = rows - sum(counts.values())
        levels.append(ABSENT)
    shares = [counts[level] / rows for level in levels[1:]]
    spread = tuple(math.sqrt(share * (1 - share)) or 1.0 for share in shares)
    return TableColumn(name, tuple(levels), tuple(shares), spread)


def _number(name: str, parts: Sequence[NumberSums], rows: int) -> TableColumn:
    count = sum(part.count for part in parts)
    if not count:
        raise DataError(f"the column '{name}' is empty at every site; leave it out")
    mean = sum(part.sum for part in parts) / count
    squares = sum(part.squares for part in parts)
    # missing values are replaced by the mean: they add nothing to the variance
    variance = (squares - count * mean * mean) / rows
    if not math.isfinite(variance):
        raise DataError(f"the sums of the column '{name}' overflow; a site reports extreme values")
    constant = variance <= 1e-12 * squares / rows
    return TableColumn(name, (), (mean,), (1.0 if constant else math.sqrt(variance),))


def _encoded(column: TableColumn, values: Sequence[str]) -> Array:
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
