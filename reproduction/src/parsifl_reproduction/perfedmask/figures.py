"""Figures 4 to 6 of PerFedMask's paper, and the seven methods and three designs at small scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.perfedmask.claims import column, in_order, verdict
from parsifl_reproduction.perfedmask.masks import TABLE_5
from parsifl_reproduction.perfedmask.setup import PAPER, SEVEN, TITLES, Cell, plan
from parsifl_reproduction.perfedmask.tables import TABLE_1
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, by_label, spread

FIGURE_4 = tuple(Cell(data, method) for data in ("CIFAR-100", "DomainNet") for method in SEVEN)
FIGURE_5 = tuple(
    Cell(data, method, 0.1)
    for data in ("CIFAR-10", "CIFAR-100")
    for method in ("perfedmask", "fedbabu", "fedavg", "splitmix")
)
FIGURE_6 = tuple(Cell(data, method, 0.1) for data in ("CIFAR-10", "CIFAR-100") for method in SEVEN)
_BEST = {cell: value for cell, value in TABLE_1.items() if cell.federation == "CIFAR-10"}
_DESIGNS = {replace(cell, nu=0.5): value for cell, value in TABLE_5.items()}


def _plan(cells: Sequence[Cell], context: Context) -> list[Job]:
    return plan(cells, context)


def _conclude_loss(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Masks cost something: the loss of PerFedMask ends above that of FedBABU."""
    note = "the loss of the global model on held-out rows: training losses are not recorded"
    return _last(context, results, FIGURE_4, "loss_curve", ("fedbabu", "perfedmask"), note)


def _conclude_accuracy(context: Context, results: Sequence[Result]) -> list[Claim]:
    note = "accuracy of the global model on validation rows (test rows where there are none)"
    return _last(context, results, FIGURE_5, "accuracy_curve", ("fedavg", "perfedmask"), note)


def _last(
    context: Context,
    results: Sequence[Result],
    cells: Sequence[Cell],
    key: str,
    pair: tuple[str, str],
    note: str,
) -> list[Claim]:
    """Judge whether the curve of the second method ends above that of the first."""
    grouped = by_label(results)
    claims: dict[str, Claim] = {}
    for cell in cells:
        here = cell.at(context)
        statement = (
            f"{here.federation}: the curve of {TITLES[pair[1]]} ends above that of "
            f"{TITLES[pair[0]]}"
        )
        curves = [column(grouped, replace(here, method=name).label, key) for name in pair]
        low, high = ([curve[-1][1] for curve in part or ()] for part in curves)
        if not low or not high:
            claims.setdefault(statement, Claim(statement, "curves", "", "not run", note))
            continue
        held = sum(high) / len(high) > sum(low) / len(low)
        ours = f"{spread(high)} against {spread(low)}"
        claims.setdefault(statement, Claim(statement, "curves", ours, verdict(held), note))
    return list(claims.values())


def _conclude_boxes(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Compare the low ends of the boxes: the tenth of the devices that fares worst."""
    grouped = by_label(results)
    claims: dict[str, Claim] = {}
    for cell in FIGURE_6:
        if cell.method == "perfedmask":
            continue
        here = cell.at(context)
        pair = [
            column(grouped, one.label, "after_worst_decile")
            for one in (replace(here, method="perfedmask"), here)
        ]
        statement = (
            f"{here.federation}: the worst tenth of the devices fares better under PerFedMask than "
            f"under {TITLES[cell.method]}"
        )
        claims.setdefault(statement, compare(statement, "boxes", *pair))
    means = {cell: value for cell, value in TABLE_1.items() if cell.participation == 0.1}
    return [*claims.values(), *in_order(context, results, means, "perfedmask", "after")]


def _conclude_all(context: Context, results: Sequence[Result]) -> list[Claim]:
    methods = in_order(context, results, _BEST, "perfedmask", "after")
    return methods + in_order(context, results, _DESIGNS, "perfedmask", "before")


RECIPES = (
    Recipe(
        "perfedmask-figure4", "Loss over rounds", PAPER, partial(_plan, FIGURE_4), _conclude_loss
    ),
    Recipe(
        "perfedmask-figure5", "Validation accuracy over rounds", PAPER, partial(_plan, FIGURE_5),
        _conclude_accuracy,
    ),
    Recipe(
        "perfedmask-figure6", "Accuracy over devices", PAPER, partial(_plan, FIGURE_6),
        _conclude_boxes,
    ),
    Recipe(
        "perfedmask-all", "Seven methods and three designs of masks, side by side", PAPER,
        partial(_plan, (*_BEST, *_DESIGNS)), _conclude_all,
    ),
)  # fmt: skip
