"""What a site releases: rules that the site sets, checked before anything leaves it.

Every rule is a small pure function that returns or raises `Refusal`. A refusal names the rule and,
where it helps, a column; it never holds a value of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core import config
from parsifl.core.algorithm import ClientInfo
from parsifl.core.config import Count, Fraction
from parsifl.core.errors import ParsiflError
from parsifl.engine.experiment import Experiment
from parsifl.flower.tables import Agreement, Array, Prepared, TableColumn, present

Mask = npt.NDArray[np.bool_]
_PREFIX = "guard-"
_SMALLEST, _LARGEST, _FARTHEST = 1e-100, 1e100, 1e6


class Refusal(ParsiflError):
    """A site does not release something; `rule` is the code that travels with the text."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


@final
@dataclass(frozen=True)
class Guards:
    """The limits of one site; the node's configuration sets them, as in `guard-rows=20`.

    Parameters
    ----------
    rows
        The smallest number of rows, and of values in a column of numbers, that are summed up.
    cell
        The smallest number of rows in a level, or in a cell of two levels.
    sites
        The smallest number of sites in a run.
    ratio
        The largest number of columns in a message, as a fraction of the site's rows.
    rounds
        The largest number of training requests that are answered in a run.
    runs
        The largest number of runs that are answered about the same rows.
    """

    rows: Count = 10
    cell: Count = 3
    sites: Count = 3
    ratio: Fraction = 1 / 3
    rounds: Count = 100
    runs: Count = 10

    def __post_init__(self) -> None:
        config.check(self)

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Guards:
        """Read the guards from a node's configuration.

        >>> Guards.of({"partition-id": 0, "guard-rows": 20}).rows
        20
        """
        given = {k.removeprefix(_PREFIX): v for k, v in node.items() if k.startswith(_PREFIX)}
        return config.build(cls, given)

    def columns(self, rows: int) -> int:
        """Return how many columns a message of a site with so many rows may have."""
        return int(self.ratio * rows + 1e-9)


def rare(counts: Mapping[str, int], cell: int) -> set[str]:
    """Return the levels to be merged, so that no level is left with fewer than `cell` rows.

    The merged level must be large enough too: if it is not, the smallest of the others join it.

    >>> sorted(rare({"a": 5, "b": 4, "c": 1}, 3))
    ['b', 'c']
    """
    merged = {level for level, count in counts.items() if count < cell}
    others = sorted(counts.keys() - merged, key=lambda level: (counts[level], level))
    while merged and others and sum(counts[level] for level in merged) < cell:
        merged.add(others.pop(0))
    return merged


def check_plan(experiment: Experiment, client: int, rows: int, guards: Guards) -> None:
    """Check the settings of a run: enough rows and sites, full batches, few coefficients."""
    if rows < guards.rows:
        raise Refusal("rows", f"its table has fewer than {guards.rows} rows")
    if (experiment.clients or 0) < guards.sites:
        raise Refusal("sites", f"the run has fewer than {guards.sites} sites")
    method = experiment.method()
    draws = method.batches(ClientInfo(client, rows, {}), 0).batches.values()
    if any(draw.batch_size is not None and draw.batch_size < rows for draw in draws):
        raise Refusal("batch", "the run draws mini-batches; set batch to none (all rows)")
    if isinstance(method, SparsitySettings) and method.density is None:
        check_width(method.tau, rows, guards)


def check_width(columns: int, rows: int, guards: Guards) -> None:
    """Check that a message has few columns for the number of rows behind it."""
    if columns > guards.columns(rows):
        raise Refusal(
            "ratio",
            f"more columns than {guards.ratio:.3g} times its rows would leave in one message; "
            "choose a smaller tau",
        )


def check_agreement(agreement: Agreement, own: Prepared) -> None:
    """Hold an agreement that came from the server against the site's own table."""
    if agreement.target != own.target:
        raise Refusal("target", f"the run does not predict '{own.target}', as this site expects")
    names = [column.name for column in agreement.columns]
    if sorted(names) != sorted(name for name in own.table if name != own.target):
        raise Refusal("columns", "the agreed columns are not the columns of its table")
    reach = _FARTHEST * (1 + _size(own.numbers(own.target)))
    if agreement.rows < own.rows or not abs(agreement.target_mean) <= reach:
        raise Refusal("agreement", "the agreed numbers of rows and means are impossible")
    for column in agreement.columns:
        _check_column(column, own)


def _check_column(column: TableColumn, own: Prepared) -> None:
    if present(own.table[column.name]) and bool(column.levels) is not (column.name in own.words):
        raise Refusal("kinds", f"column '{column.name}': numbers here, words there, or reversed")
    known = set(column.levels)
    fits = len(column.mean) == len(column.scale) == (len(known) - 1 if known else 1)
    if len(known) != len(column.levels) or not fits:
        raise Refusal("levels", f"column '{column.name}': its levels are malformed")
    if known and not own.levels(column.name) <= known:
        raise Refusal("levels", f"column '{column.name}': levels of this site were left out")
    means, scales = np.array(column.mean), np.array(column.scale)
    # far means and extreme scales would turn rounding and overflow into comparisons of values; the
    # limit follows from the sums that the server has, so that a refusal says nothing new
    reach = 1.0 if known else _FARTHEST * (1 + _size(own.numbers(column.name)))
    plausible = (np.abs(means) <= reach) & (scales >= _SMALLEST) & (scales <= _LARGEST)
    if not plausible.all():
        raise Refusal("scales", f"column '{column.name}': an impossible mean or scale")


def _size(values: Array) -> float:
    return float(np.sqrt(np.mean(values * values))) if len(values) else _LARGEST / _FARTHEST


def check_support(
    support: Sequence[Any], width: int, experiment: Experiment, rows: int, guards: Guards
) -> list[int]:
    """Return the positions of the selected columns, if the run may ask for them."""
    method = experiment.method()
    most = method.sparsity.count(width) if isinstance(method, SparsitySettings) else width
    inside = all(type(place) is int and 0 <= place < width for place in support)
    if not inside or len(set(support)) != len(support) or len(support) > most:
        raise Refusal("support", f"expected at most {most} different positions of columns")
    check_width(len(support), rows, guards)
    return list(support)


def check_cells(own: Prepared, names: Sequence[str], x: Array, guards: Guards) -> None:
    """Check that no product of two columns is a sum over a few rows.

    Parameters
    ----------
    names
        The column of the table to which each column of `x` belongs.
    x
        The selected columns of the design matrix; the target is looked at as well.
    """
    target = own.numbers(own.target)
    spots = [mask for values in (*x.T, target) if (mask := _spot(values)) is not None]
    masks = [*spots, *(~mask for mask in spots)]
    masks += [own.observed(name) for name in dict.fromkeys(names) if name not in own.words]
    if not masks:
        return
    every = np.stack(masks).astype(np.int64)
    cells = every @ every.T
    if ((cells > 0) & (cells < guards.cell)).any():
        raise Refusal(
            "cell",
            f"two of the selected columns, or one and the target, share a cell of fewer than "
            f"{guards.cell} rows; merge levels or leave a column out",
        )


def _spot(values: Array) -> Mask | None:
    """Return where a column has its usual value; None if it has many values, none of them usual."""
    found, counts = np.unique(values, return_counts=True)
    usual = values == found[counts.argmax()]
    return usual if len(found) == 2 or 2 * int(usual.sum()) > len(values) else None


def few_differ(values: Array, cell: int) -> bool:
    """Return whether a column is constant but for fewer than `cell` rows.

    >>> few_differ(np.array([0.0, 0.0, 0.0, 7.0]), 3)
    True
    """
    _, counts = np.unique(values, return_counts=True)
    return 0 < len(values) - int(counts.max(initial=0)) < cell
