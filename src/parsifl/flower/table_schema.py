"""What a site says of its table, and the table made ready: nothing rare, odd or alone is left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from parsifl.flower.guards import Guards, Refusal, few_differ, rare
from parsifl.flower.logs import node_log
from parsifl.flower.tables import ABSENT, LONGEST, MISSING, MOST_LEVELS, RARE, Prepared, Table

_SEPARATOR = "|"


@final
@dataclass(frozen=True)
class TableSchema:
    """What a site declares of its columns.

    Parameters
    ----------
    missing
        Codes that stand for a missing value, besides empty, NA, NaN, null and ?.
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


def prepare(table: Table, target: str, schema: TableSchema, guards: Guards) -> Prepared:
    """Return a table from which aggregates may leave, or raise `Refusal`.

    Missing codes become empty. Levels with too few rows are merged into one level. A column of
    numbers with too few values, or with the same value in all but a few rows, is withheld: all
    its values count as missing. Which row is at fault is in the node's log only.
    """
    if target not in table:
        raise Refusal("target", f"its table has no column '{target}', which is to be predicted")
    lengths = {len(values) for values in table.values()}
    if lengths != {len(table[target])} or len(table[target]) < guards.rows:
        raise Refusal("rows", f"its columns have unequal lengths, or fewer than {guards.rows} rows")
    if not table.keys() >= set(schema.words):
        raise Refusal("schema", "a column that is declared as words is not in its table")
    codes = {*MISSING, *schema.missing}
    clean = {
        name: ["" if value in codes else value for value in values]
        for name, values in table.items()
    }
    words = frozenset(name for name, values in clean.items() if _is_words(name, values, schema))
    if target in words or "" in clean[target]:
        raise Refusal(
            "target",
            f"the column '{target}' has missing values or words; leave those rows out, and "
            "predict a number",
        )
    guarded = {
        name: _merged(name, values, guards) if name in words else _withheld(name, values, guards)
        for name, values in clean.items()
    }
    if "" in guarded[target]:
        raise Refusal("target", f"the column '{target}' is constant but for a few rows")
    return Prepared(guarded, target, words)


def _is_words(name: str, values: Sequence[str], schema: TableSchema) -> bool:
    """Return whether a column holds words; raise Refusal if it holds numbers and words."""
    there = [(row, value) for row, value in enumerate(values, 1) if value]
    if name in schema.words:
        return True
    odd = [row for row, value in there if not _is_number(value)]
    if odd and len(odd) < len(there):
        listed = ", ".join(f"row {row} ({values[row - 1]!r:.40})" for row in odd[:10])
        node_log().error("column %r: %d values are not numbers: %s", name, len(odd), listed)
        raise Refusal(
            "numbers",
            f"column '{name}': not all values are numbers; declare missing codes (missing), or "
            "the column as words (words), in the node's configuration",
        )
    return bool(odd)


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _merged(name: str, values: Sequence[str], guards: Guards) -> list[str]:
    if RARE in values or ABSENT in values:
        raise Refusal(
            "marker", f"column '{name}': {RARE} and {ABSENT} have a meaning here; rename that level"
        )
    few = rare(Counter(values), guards.cell)
    found = [RARE if value in few else value for value in values]
    levels = set(found)
    if len(levels) > MOST_LEVELS or any(len(level) > LONGEST for level in levels):
        raise Refusal("levels", f"column '{name}': too many levels, or a level that is too long")
    return found


def _withheld(name: str, values: Sequence[str], guards: Guards) -> list[str]:
    numbers = np.array([float(value) for value in values if value])
    alone = len(numbers) < guards.rows or few_differ(numbers, guards.cell)
    if len(numbers) and alone:
        node_log().warning(
            "column %r: withheld, since too few rows have a value of their own", name
        )
        return [""] * len(values)
    return list(values)
