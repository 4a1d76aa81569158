"""How results are set beside the numbers of PerFedMask's paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.perfedmask.setup import TITLES, Cell
from parsifl_reproduction.recipe import Claim, Context, Result, Values, Verdict, by_label

Published = Mapping[Cell, float]


def in_order(
    context: Context, results: Sequence[Result], published: Published, lead: str, key: str
) -> list[Claim]:
    """Judge, for each cell beside the one of `lead`, whether the paper's order is ours."""
    grouped = by_label(results)
    claims: dict[Cell, Claim] = {}
    for cell, theirs in published.items():
        first = replace(cell, method=lead)
        if cell.method == lead or first not in published:
            continue
        above = published[first] > theirs
        statement = (
            f"{cell.at(context).federation}, c = {cell.at(context).participation:g}: "
            f"{TITLES[lead]} is {'above' if above else 'below'} {TITLES[cell.method]} ({key} "
            "fine-tuning)"
        )
        paper = f"{published[first]:g} against {theirs:g} on {cell.federation}"
        ours = [column(grouped, one.at(context).label, key) for one in (first, cell)]
        found = compare(statement, paper, ours[0], ours[1], above=above)
        spent = _spent(grouped, first.at(context).label, cell.at(context).label)
        # cells that are one at this scale are judged by the first of them
        claims.setdefault(cell.at(context), replace(found, note=found.note + spent))
    return list(claims.values())


def _spent(grouped: Mapping[str, list[Values]], *labels: str) -> str:
    """Tell how much both sides compute: a method that computes more has it easier."""
    costs = [
        [a + b for a, b in zip(forward, backward, strict=True)]
        for label in labels
        if (forward := column(grouped, label, "forward"))
        and (backward := column(grouped, label, "backward"))
    ]
    if len(costs) < 2:
        return ""
    left, right = (f"{fmean(part) / 1e9:.2f}" for part in costs)
    return f"; a device computes {left} against {right} GFLOP a round"


def column(grouped: Mapping[str, list[Values]], label: str, key: str) -> list[Any] | None:
    """Return one value of every seed of a label; None if it did not run."""
    found = [values[key] for values in grouped.get(label, ()) if key in values]
    return found or None


def verdict(held: bool) -> Verdict:
    """Return the word for the outcome of a comparison."""
    return "held" if held else "did not hold"
