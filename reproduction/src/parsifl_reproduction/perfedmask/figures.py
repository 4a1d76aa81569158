"""Figures 4 to 6 of PerFedMask's paper: curves and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.perfedmask import deviations
from parsifl_reproduction.perfedmask.claims import (
    COMPARABLE,
    Grouped,
    after,
    column,
    replaced,
    train_loss,
    untrained,
    validation,
    worst,
)
from parsifl_reproduction.perfedmask.setup import FEDERATIONS, PAPER, TITLES, plan
from parsifl_reproduction.perfedmask.tables import Row, more_loss, rows_1, rows_7
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, by_label, spread

_CHANCE = 100 / 10
_CURVES = "curves; the text states no order"
_BOXES = "boxes; the text states no order, and the worst tenth is our measure"
_FIGURE_5 = ("perfedmask", "fedbabu", "fedavg", "splitmix")


# ---------------------------------------------------------------------- Figure 4
def _rows_4(context: Context) -> list[Row]:
    return [row for row in rows_1(context) if row.participation == 1.0] + list(rows_7(context))


def _plan_4(context: Context) -> list[Job]:
    return plan([cell for row in _rows_4(context) for cell in row.cells], context)


def _conclude_4(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    rows = _rows_4(context)
    return [*(more_loss(grouped, row) for row in rows), *(_losses(grouped, row) for row in rows)]


def _losses(grouped: Grouped, row: Row) -> Claim:
    """List where the curves of all methods end; the text compares two of them only."""
    statement = f"{row.name}: the training loss of every method at the end"
    found = {name: column(grouped, row.cell(name), train_loss) for name in row.methods}
    known = {TITLES[name]: values for name, values in found.items() if values}
    if len(known) < len(found):
        return Claim(statement, _CURVES, "", "not run")
    ours = ", ".join(f"{name} {spread(values)}" for name, values in known.items())
    return Claim(statement, _CURVES, ours, "none", "not evaluated")


# ---------------------------------------------------------------------- Figures 5 and 6
def _rows(context: Context, methods: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of Table 1 at c = 0.1, with the methods of a figure."""
    return [
        replace(row, methods=tuple(m for m in row.methods if methods is None or m in methods))
        for row in rows_1(context)
        if row.participation == 0.1
    ]


def _plan_5(context: Context) -> list[Job]:
    return plan([cell for row in _rows(context, _FIGURE_5) for cell in row.cells], context)


def _follow_5(context: Context, results: Sequence[Result]) -> list[Job]:
    """Replace the seeds at chance of claims that they leave undecided."""
    grouped = by_label(results)
    return [
        job
        for row in _rows(context, _FIGURE_5)
        for job in replaced(
            {row.pair(other): _ends(grouped, row, other) for other in row.methods[1:]},
            validation,
            _CHANCE,
            context,
            results,
        )
    ]


def _conclude_5(context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    return [
        _ends(grouped, row, other) for row in _rows(context, _FIGURE_5) for other in row.methods[1:]
    ]


def _ends(grouped: Grouped, row: Row, other: str) -> Claim:
    """Compare the last validation accuracies of PerFedMask and another method."""
    pair = [column(grouped, row.cell(name), validation) for name in ("perfedmask", other)]
    least = -COMPARABLE if other == "fedbabu" else 0.0
    where = f"at most {COMPARABLE:g} points below" if least else "above"
    statement = (
        f"{row.name}: the validation accuracy of PerFedMask ends {where} that of {TITLES[other]}"
    )
    sides = dict(zip(("PerFedMask", TITLES[other]), pair, strict=True))
    return compare(statement, _CURVES, *pair, least=least, untrained=untrained(_CHANCE, sides))


def _plan_6(context: Context) -> list[Job]:
    return plan([cell for row in _rows(context) for cell in row.cells], context)


def _conclude_6(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare the low ends of the boxes: the worst tenth of the devices."""
    grouped = by_label(results)
    claims = []
    for row in _rows(context):
        for other in row.methods[1:]:
            pair = [column(grouped, row.cell(name), worst) for name in ("perfedmask", other)]
            statement = (
                f"{row.name}: the worst tenth of the devices has a higher accuracy under "
                f"PerFedMask than under {TITLES[other]}"
            )
            means = {
                f"the mean of {TITLES[name]}": column(grouped, row.cell(name), after)
                for name in ("perfedmask", other)
            }
            flags = untrained(FEDERATIONS[row.federation].chance, means)
            claims.append(compare(statement, _BOXES, *pair, untrained=flags))
    return claims


RECIPES = (
    Recipe(
        "perfedmask-figure4", "Training loss over rounds", PAPER, _plan_4, _conclude_4,
        deviations.of("MLP", "looks", more=(deviations.LOSS,), wide=False),
    ),
    Recipe(
        "perfedmask-figure5", "Validation accuracy over rounds", PAPER, _plan_5, _conclude_5,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100,)), _follow_5,
    ),
    Recipe(
        "perfedmask-figure6", "Accuracy over devices", PAPER, _plan_6, _conclude_6,
        deviations.of("MLP", more=(deviations.NO_CIFAR_100, deviations.FEDPROX)),
    ),
)  # fmt: skip
