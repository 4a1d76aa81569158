"""What a site says of its table, and the table made ready: nothing rare, odd or alone is left."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
from annotated_types import MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.preprocessing import (
    ABSENT,
    LONGEST,
    MOST_LEVELS,
    RARE,
    Array,
    is_words,
    observed,
)
from parsifl.data.tables import Column, Columns, MixedColumnError, as_columns, is_table
from parsifl.flower.guards import Guards, Refusal, few_differ, rare
from parsifl.flower.logs import node_log
from parsifl.flower.tables import Prepared, RegressionSpec

_SEPARATOR = "|"


@final
@dataclass(frozen=True)
class ColumnSchema:
    """What a site declares of one column.

    Parameters
    ----------
    kind
        "number" or "words".
    unit
        The unit; sites that declare different ones are not combined.
    range
        The smallest and the largest number.
    levels
        The words that may occur; empty: any.
    missing
        Codes that stand for a missing value in this column.
    """

    kind: Literal["number", "words"]
    unit: Annotated[str, MaxLen(100)] = ""
    range: tuple[float, float] | None = None
    levels: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class TableSchema:
    """What a site declares of its table.

    Parameters
    ----------
    missing
        Codes that stand for a missing value, besides those of every table (empty, NA, ?, ...).
    words
        Columns that hold words although some or all of their values look like numbers.
    columns
        Declared columns. Others are not read; empty: all are.
    targets
        The columns that may be predicted; empty: any.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    missing: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    columns: dict[str, ColumnSchema] = field(default_factory=dict)
    targets: tuple[str, ...] = ()

    def joined(self, node: Mapping[str, Any]) -> TableSchema:
        """Add what the node's configuration declares.

        `missing` and `words` are separated by `|`; `schema` names a TOML file with the same
        entries as this class.

        >>> TableSchema().joined({"missing": "N/A|.|<0.3"}).missing
        ('N/A', '.', '<0.3')
        """
        given = {
            name: tuple(str(node[name]).split(_SEPARATOR)) if name in node else ()
            for name in ("missing", "words")
        }
        file = _read_schema(Path(str(node["schema"]))) if "schema" in node else TableSchema()
        return TableSchema(
            self.missing + file.missing + given["missing"],
            self.words + file.words + given["words"],
            {**self.columns, **file.columns},
            self.targets + file.targets,
        )

    @property
    def units(self) -> dict[str, str]:
        """The declared units."""
        return {name: column.unit for name, column in self.columns.items() if column.unit}


def _read_schema(path: Path) -> TableSchema:
    try:
        return TypeAdapter(TableSchema).validate_python(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a schema: {error}") from None


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
    """Return the typed columns that the site reads."""
    names = [str(name) for name in getattr(table, "columns", table)]
    if schema.targets and spec.target not in schema.targets:
        raise Refusal("target", f"it does not allow '{spec.target}' to be predicted")
    if not set(names) >= {*schema.words, *schema.columns}:
        raise Refusal("schema", "a column that is declared is not in its table")
    words = {*schema.words, *(n for n, c in schema.columns.items() if c.kind == "words")}
    words |= {spec.target} if spec.family == "logistic" else set()
    found: dict[str, Column] = {}
    try:
        for name in [name for name in names if not schema.columns or name in schema.columns]:
            declared = schema.columns.get(name)
            codes = (*schema.missing, *(declared.missing if declared else ()))
            part = table[[name]] if is_table(table) else {name: table[name]}
            found |= as_columns(part, codes, words)
            if declared is not None:
                _check_declared(name, found[name], declared, words)
    except MixedColumnError as error:
        values = list(table[error.name])
        listed = ", ".join(f"row {row} ({values[row - 1]!r:.40})" for row in error.rows[:10])
        count = len(error.rows)
        node_log().error("column %r: %d values are not numbers: %s", error.name, count, listed)
        raise Refusal("numbers", f"{error}, in the node's configuration") from None
    except DataError as error:  # its text names columns, never values
        raise Refusal("table", str(error)) from None
    return found


def _check_declared(name: str, column: Column, declared: ColumnSchema, words: set[str]) -> None:
    """Refuse a column that is not as declared; the rows at fault are in the node's log only."""
    if is_words(column) is not (name in words):
        raise Refusal("schema", f"column '{name}': declared as numbers, and holds words")
    outside = np.zeros(len(column), np.bool_)
    if declared.levels:
        outside = observed(column) & ~np.isin(column, np.array(declared.levels))
    elif declared.range is not None and not is_words(column):
        numbers, (low, high) = np.asarray(column, np.float64), declared.range
        outside = observed(column) & ~((numbers >= low) & (numbers <= high))
    if outside.any():
        rows = ", ".join(str(row + 1) for row in np.flatnonzero(outside)[:10])
        node_log().error("column %r: %d values are not as declared: rows %s", name,
                         int(outside.sum()), rows)  # fmt: skip
        raise Refusal("schema", f"column '{name}': values that its schema does not allow")


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
