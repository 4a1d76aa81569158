"""Encode the tables of several sites as one design matrix, agreed on from counts and sums."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, final

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Lt, MaxLen, MinLen
from pydantic import AfterValidator, ConfigDict

from parsifl.core.errors import DataError, ParsiflWarning
from parsifl.data.tables import Column, Columns

Array = npt.NDArray[np.float64]
RARE, ABSENT = "(rare)", "(missing)"
"""Levels for merged rare levels and for missing values; values must differ from them."""
MOST_COLUMNS, MOST_LEVELS, LONGEST = 100_000, 1000, 200
_MOST_ROWS, _MOST_AGREED = 1 << 40, 100_000
_FAR, _RATIO = 6.0, 4.0
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Text = Annotated[str, MaxLen(LONGEST)]
Count = Annotated[int, Ge(0), Lt(_MOST_ROWS)]


def is_words(column: Column) -> bool:
    """Return whether a column holds words."""
    return column.dtype.kind == "U"


def observed(column: Column) -> npt.NDArray[np.bool_]:
    """Return which values of a column are not missing."""
    return np.asarray(column != "" if is_words(column) else column == column)


@final
@dataclass(frozen=True)
class NumberSums:
    """A column of numbers at one site: their count, their sum, and the squares around their mean.

    Squares around zero would cancel for a column far from zero.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    count: Count
    sum: float
    squares: Annotated[float, Ge(0)]

    @property
    def rows(self) -> int:
        """The minimum number of rows of a table with this column."""
        return self.count

    @property
    def mean(self) -> float:
        """The mean of the values that are not missing."""
        return self.sum / self.count if self.count else 0.0


def _no_marker(levels: dict[str, int]) -> dict[str, int]:
    if ABSENT in levels:
        raise ValueError(f"{ABSENT} is not a level")
    return levels


@final
@dataclass(frozen=True)
class LevelCounts:
    """A column of words at one site: the number of rows per level, and of missing values."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
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

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    rows: Annotated[int, Gt(0), Lt(_MOST_ROWS)]
    columns: Annotated[dict[Text, ColumnSummary], MinLen(1), MaxLen(MOST_COLUMNS)]

    @property
    def size(self) -> int:
        """The bytes of the summary as JSON, as it is sent."""
        return len(json.dumps(asdict(self)).encode())


def check_counts(summary: Summary) -> Summary:
    """Return a summary; raise ValueError if counts contradict its number of rows."""
    for name, column in summary.columns.items():
        exact = isinstance(column, LevelCounts)
        if column.rows > summary.rows or (exact and column.rows != summary.rows):
            raise ValueError(f"columns.{name[:80]}: counts contradict the number of rows")
    return summary


def summarise(columns: Columns) -> Summary:
    """Return the aggregates of a site's table."""
    rows = len(next(iter(columns.values())))
    return Summary(rows, {name: summarise_column(column) for name, column in columns.items()})


def summarise_column(column: Column) -> ColumnSummary:
    """Return the aggregates of one column."""
    there = column[observed(column)]
    if len(there) and is_words(column):
        levels, counts = np.unique(there, return_counts=True)
        level_counts = {str(k): int(n) for k, n in zip(levels, counts, strict=True)}
        return LevelCounts(level_counts, len(column) - len(there))
    if is_words(column):
        return NumberSums(0, 0.0, 0.0)
    numbers = there.astype(np.float64)
    around = numbers - (numbers.mean() if len(numbers) else 0.0)
    return NumberSums(len(numbers), float(numbers.sum()), float(around @ around))


@final
@dataclass(frozen=True)
class TableColumn:
    """One column of the table: a number, or levels with an indicator for each except the first.

    The first level is the most frequent one. `mean` and `scale` belong to the number, or to each
    indicator.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
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
class Preprocessing:
    """How every site converts its table to the same columns.

    A missing number is replaced by the mean over all sites. A column of words has an indicator for
    each level except the most frequent one; a missing word is its own level. In a new table a level
    that no site had counts as `(rare)` if levels were merged, else as the most frequent one, with a
    warning; so does a missing word if none was missing.

    Attributes
    ----------
    rows
        The number of rows behind the sums.
    columns
        The columns of the table, in the order of the design matrix.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    rows: Annotated[int, Gt(0), Lt(1 << 60)]
    columns: Annotated[tuple[TableColumn, ...], MaxLen(MOST_COLUMNS)]

    @classmethod
    def of(cls, summaries: Sequence[Summary], sites: Sequence[str] | None = None) -> Preprocessing:
        """Build the agreement from the sites' summaries, in the column order of the first one."""
        names = [f"client {i}" for i in range(len(summaries))] if sites is None else list(sites)
        first = list(summaries[0].columns)
        for site, summary in zip(names, summaries, strict=True):
            if set(summary.columns) != set(first):
                differ = sorted(set(summary.columns) ^ set(first))
                raise DataError(
                    f"{site} and {names[0]} differ in {len(differ)} columns, such as "
                    f"{', '.join(name[:40] for name in differ[:5])}"
                )
        rows = sum(summary.rows for summary in summaries)
        parts = {name: [s.columns[name] for s in summaries] for name in first}
        return cls(rows, tuple(_agreed(name, parts[name], rows) for name in first))

    @property
    def names(self) -> list[str]:
        """The columns of the design matrix: `age`, or `sex=f` for an indicator."""
        return [name for column in self.columns for name in column.names]

    @property
    def units(self) -> list[int]:
        """The column of the table to which each column of the design matrix belongs."""
        return [i for i, column in enumerate(self.columns) for _ in column.names]

    @property
    def size(self) -> int:
        """The bytes of the preprocessing as JSON, as it is sent."""
        return len(json.dumps(asdict(self)).encode())

    @property
    def mean(self) -> Array:
        """The means of the columns of the design matrix."""
        return np.array([value for column in self.columns for value in column.mean])

    @property
    def scale(self) -> Array:
        """The standard deviations of the columns of the design matrix; 1 for a constant one."""
        return np.array([value for column in self.columns for value in column.scale])

    def design(self, table: Columns) -> Array:
        """Return the design matrix of a table, in its units; other columns are not read."""
        absent = [column.name for column in self.columns if column.name not in table]
        if absent:
            raise DataError(
                f"the table lacks {_counted(absent, 'column')}: "
                f"{', '.join(name[:40] for name in absent[:5])}{', ...' * (len(absent) > 5)}"
            )
        parts = [_encoded(column, table[column.name]) for column in self.columns]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def standardised(self, table: Columns) -> Array:
        """Return the design matrix, centred and scaled."""
        return (self.design(table) - self.mean) / self.scale

    def sums(self, site: Summary) -> Array:
        """Return the sums of the standardised columns over the rows of a site, from its summary."""
        sums: list[float] = []
        for column in self.columns:
            part = site.columns[column.name]
            if isinstance(part, LevelCounts):
                counts = {ABSENT: part.missing, **part.levels}
            elif column.levels:  # no row of the site has a word
                counts = {ABSENT: site.rows}
            else:
                sums.append(part.count * (part.mean - column.mean[0]))
                continue
            for level, mean in zip(column.levels[1:], column.mean, strict=True):
                sums.append(counts.get(level, 0) - site.rows * mean)
        return np.array(sums) / self.scale


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
    if sum(counts.values()) < rows:
        counts[ABSENT] = rows - sum(counts.values())
    plain = [level for level in counts if level not in (RARE, ABSENT)] or list(counts)
    usual = min(plain, key=lambda level: (-counts[level], level))
    others = sorted(counts.keys() - {usual}, key=lambda level: (level in (RARE, ABSENT), level))
    shares = [counts[level] / rows for level in others]
    spread = tuple(math.sqrt(share * (1 - share)) or 1.0 for share in shares)
    return TableColumn(name, (usual, *others), tuple(shares), spread)


def pooled(parts: Sequence[NumberSums]) -> tuple[int, float, float]:
    """Return the count, the mean and the squares around it of several sites together."""
    count = sum(part.count for part in parts)
    mean = sum(part.sum for part in parts) / count if count else 0.0
    # products overflow to infinity, powers raise
    between = sum(part.count * (part.mean - mean) * (part.mean - mean) for part in parts)
    return count, mean, sum(part.squares for part in parts) + between


def _number(name: str, parts: Sequence[NumberSums], rows: int) -> TableColumn:
    count, mean, squares = pooled(parts)
    if not count:
        raise DataError(f"the column '{name}' is empty at every site; remove it")
    # missing values are replaced by the mean and do not contribute to the variance
    variance = squares / rows
    if not math.isfinite(variance + mean * mean):
        raise DataError(f"the sums of the column '{name}' overflow; a site reports extreme values")
    constant = variance <= 1e-26 * (variance + mean * mean)
    return TableColumn(name, (), (mean,), (1.0 if constant else math.sqrt(variance),))


def unit_notes(summaries: Sequence[Summary], sites: Sequence[str]) -> list[str]:
    """Return a sentence for each column of a site whose unit seems to differ.

    That is a mean more than 6 within-site standard deviations from that of the others, or mean
    and deviation that are both 4 times as large (or as small).
    """
    notes = []
    for name in summaries[0].columns:
        known = [
            (site, part.mean, math.sqrt(part.squares / part.count))
            for site, summary in zip(sites, summaries, strict=True)
            if isinstance(part := summary.columns.get(name), NumberSums)
            and part.count > 1
            and part.squares > 0
        ]
        if len(known) < 2:
            continue
        typical = known if len(known) > 2 else known[:1]
        middle, usual = (float(np.median([entry[i] for entry in typical])) for i in (1, 2))
        for site, mean, spread in known:
            ratios = abs(mean / middle) if middle else 1.0, spread / usual
            scaled = all(r > _RATIO for r in ratios) or all(r < 1 / _RATIO for r in ratios)
            if scaled or abs(mean - middle) > _FAR * max(spread, usual):
                notes.append(
                    f"column '{name}': {site} has mean {mean:.4g} and standard deviation "
                    f"{spread:.3g}, the other sites about {middle:.4g} and {usual:.3g}; check its "
                    "unit"
                )
    return notes


def _encoded(column: TableColumn, values: Column) -> Array:
    there = observed(values)
    if not column.levels:
        if is_words(values) and there.any():
            raise DataError(f"the column '{column.name}' must hold numbers")
        numbers = np.full(len(values), column.mean[0])
        numbers[there] = values[there]
        return numbers[:, None]
    if not is_words(values) and there.any():
        raise DataError(f"the column '{column.name}' must hold words, such as {column.levels[0]}")
    code_of = {level: position for position, level in enumerate(column.levels)}
    words = [str(value) if known else ABSENT for value, known in zip(values, there, strict=True)]
    new = sorted({level for level in words if level not in code_of})
    if new and RARE not in code_of:
        warnings.warn(
            f"column '{column.name}': {_counted(new, 'level')} that no site had, such as "
            f"{new[0][:40]!r}, treated as {column.levels[0]!r}",
            ParsiflWarning,
            stacklevel=4,
        )
    codes = [code_of.get(level, code_of.get(RARE, 0)) for level in words]
    return np.asarray(np.eye(len(column.levels))[codes][:, 1:])


def _counted(things: Sequence[str], what: str) -> str:
    return f"{len(things)} {what}{'s' * (len(things) != 1)}"


def named_levels(columns: Mapping[str, Column], name: str) -> set[str]:
    """Return the levels of a column that occur, with a marker for missing values."""
    return {str(value) or ABSENT for value in columns[name]}
