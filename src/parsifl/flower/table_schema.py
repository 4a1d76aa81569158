"""What a site says of its table, and the table made ready: nothing rare, odd or alone is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.preprocessing import ABSENT, LONGEST, MOST_LEVELS, RARE, Array, is_words
from parsifl.data.tables import Column, Columns, MixedColumnError, as_columns
from parsifl.flower.guards import Guards, Refusal, few_differ, rare
from parsifl.flower.logs import node_log
from parsifl.flower.tables import Prepared, RegressionSpec

_SEPARATOR = "|"


@final
@dataclass(frozen=True)
class TableSchema:
    """What a site declares of its columns.

    Parameters
    ----------
    missing
        Codes that stand for a missing value, besides those of every table (empty, NA, ?, ...).
    words
        Columns that hold words although some or all of their values look like numbers.
    """

    missing: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def joined(self, node: Mapping[str, Any]) -> TableSchema:
        """Add what the node's configuration declares, separated by `|`.

        >>> TableSchema().joined({"missing": "N/A|.|<0.3"}).missing
        ('N/A', '.', '<0.3')
        """
        given = {
            name: tuple(str(node[name]).split(_SEPARATOR)) if name in node else ()
            for name in ("missing", "words")
        }
        return TableSchema(self.missing + given["missing"], self.words + given["words"])


def prepare(table: Any, spec: RegressionSpec, schema: TableSchema, guards: Guards) -> Prepared:
    """Return a table from which aggregates may leave, or raise `Refusal`.

    Levels with too few rows are merged into one level, also if only the rows of one class, or
    those with an event, are too few. A column of numbers with too few values, or with the same
    value in all but a few rows, is withheld: all its values count as missing. Which row is at fault
    is in the node's log only.
    """
    columns = _typed(table, spec, schema)
    fault = spec.checked(columns)
    if fault:
        raise Refusal("target", fault)
    rows = {len(column) for column in columns.values()}
    if len(rows) > 1 or min(rows) < guards.rows:
        raise Refusal("rows", f"its columns have unequal lengths, or fewer than {guards.rows} rows")
    strata = _strata(columns, spec)
    guarded = {
        name: _merged(name, column, strata, guards)
        if is_words(column)
        else _withheld(name, np.asarray(column, np.float64), guards)
        for name, column in columns.items()
    }
    for name in spec.columns:
        if not np.array_equal(guarded[name], columns[name]):
            raise Refusal("target", f"the column '{name}' is the same in all but a few rows")
    return Prepared(guarded, spec)


def _typed(table: Any, spec: RegressionSpec, schema: TableSchema) -> dict[str, Column]:
    names = set(getattr(table, "columns", table))
    if not names >= set(schema.words):
        raise Refusal("schema", "a column that is declared as words is not in its table")
    words = {*schema.words, *([spec.target] if spec.family == "logistic" else [])}
    try:
        return as_columns(table, schema.missing, words)
    except MixedColumnError as error:
        values = list(table[error.name])
        listed = ", ".join(f"row {row} ({values[row - 1]!r:.40})" for row in error.rows[:10])
        count = len(error.rows)
        node_log().error("column %r: %d values are not numbers: %s", error.name, count, listed)
        raise Refusal("numbers", f"{error}, in the node's configuration") from None
    except DataError as error:  # its text names columns, never values
        raise Refusal("table", str(error)) from None


def _strata(columns: Columns, spec: RegressionSpec) -> Column | None:
    """Return the classes or events, of which no cell with a level may be small."""
    if spec.family == "logistic":
        return columns[spec.target]
    return columns[spec.event] if spec.event else None


def _merged(name: str, column: Column, strata: Column | None, guards: Guards) -> Column:
    values = [str(value) for value in column]
    if RARE in values or ABSENT in values:
        raise Refusal(
            "marker", f"column '{name}': {RARE} and {ABSENT} have a meaning here; rename that level"
        )
    counts = [Counter(values)]
    if strata is not None and strata is not column:
        counts += [Counter(column[strata == stratum].tolist()) for stratum in np.unique(strata)]
    few = rare(counts, guards.cell)
    found = np.array([RARE if value in few else value for value in values])
    levels = set(found.tolist())
    if len(levels) > MOST_LEVELS or any(len(level) > LONGEST for level in levels):
        raise Refusal("levels", f"column '{name}': too many levels, or a level that is too long")
    return found


def _withheld(name: str, numbers: Array, guards: Guards) -> Array:
    there = numbers[~np.isnan(numbers)]
    if len(there) and (len(there) < guards.rows or few_differ(there, guards.cell)):
        node_log().warning(
            "column %r: withheld, since too few rows have a value of their own", name
        )
        return np.full(len(numbers), np.nan)
    return numbers
