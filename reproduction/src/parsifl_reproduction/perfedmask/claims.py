"""How results are set beside the numbers of PerFedMask's paper, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.perfedmask.setup import TUNED, Cell, job
from parsifl_reproduction.recipe import (
    SKIPPED,
    Claim,
    Context,
    Job,
    Result,
    Values,
    Verdict,
    spread,
)

Grouped = Mapping[str, list[Values]]
Measure = Callable[[Values], float]
COMPARABLE = 2.0
"""Points of accuracy below which we call a difference comparable; the paper gives no number."""


def column(grouped: Grouped, cell: Cell, measure: Measure) -> list[float] | None:
    """Return one value per seed of a cell; None if it did not run."""
    found = [measure(values) for values in grouped.get(cell.label, ())]
    return found or None


def before(values: Values) -> float:
    """Return the test accuracy of the global model."""
    return float(values["before"])


def after(values: Values, epochs: int = TUNED) -> float:
    """Return the test accuracy after fine-tuning."""
    return float(values["tuned"][str(epochs)]["mean"])


def worst(values: Values) -> float:
    """Return the accuracy of the worst tenth of the devices after fine-tuning."""
    return float(values["tuned"][str(TUNED)]["worst"])


def train_loss(values: Values) -> float:
    """Return the training loss after the last round."""
    return float(values["train_loss"][-1])


def train_accuracy(values: Values) -> float:
    """Return the training accuracy after the last round."""
    return float(values["train_accuracy"])


def validation(values: Values) -> float:
    """Return the validation accuracy after the last round."""
    return float(values["validation"][-1])


def sent(values: Values) -> float:
    """Return the parameters that a device sends per round."""
    return float(values["sent"])


def trained(values: Values) -> float:
    """Return the parameters that a device trains."""
    return float(values["trainable"])


def untrained(chance: float, sides: Mapping[str, Sequence[float] | None]) -> dict[str, list[bool]]:
    """Return for each side by name on which seeds it is at or below chance.

    >>> untrained(100 / 3, {"a": [70.0, 71.0], "b": [33.0, 60.0]})
    {'a': [False, False], 'b': [True, False]}
    """
    return {name: [value <= chance for value in values or ()] for name, values in sides.items()}


def replaced(
    claims: Mapping[tuple[Cell, Cell], Claim],
    measure: Measure,
    chance: float,
    context: Context,
    results: Sequence[Result],
) -> list[Job]:
    """Return further seeds of undecided comparisons in place of those at chance.

    There are as many as it takes to have the seeds that were asked for, at most as many again.
    """
    return [
        job(cell, seed, context)
        for pair, claim in claims.items()
        if claim.verdict == "undecided" and not context.smoke
        for seed in _further(pair, measure, chance, context, results)
        for cell in pair
    ]


def _further(
    pair: tuple[Cell, Cell],
    measure: Measure,
    chance: float,
    context: Context,
    results: Sequence[Result],
) -> range:
    """Return the seeds after those of the context that a comparison needs so far."""
    ran = [r for r in results if SKIPPED not in r.values]
    left, right = ({r.seed: r.values for r in ran if r.label == cell.label} for cell in pair)
    both = left.keys() & right.keys()
    trained = [s for s in both if min(measure(left[s]), measure(right[s])) > chance]
    missing = context.seeds - len(trained)
    last = min(max(both, default=-1) + 1 + missing, 2 * context.seeds) if both and missing else 0
    return range(context.seeds, last)


def spent(grouped: Grouped, *cells: Cell) -> str:
    """Return how much both sides compute: an algorithm that computes more has an advantage."""
    costs = [
        column(grouped, cell, lambda values: float(values["forward"] + values["backward"]))
        for cell in cells
    ]
    if not all(costs):
        return ""
    left, right = (f"{fmean(part or ()) / 1e9:.2f}" for part in costs)
    return f"; a device computes {left} against {right} GFLOP per round"


def slopes(x: Sequence[float], rows: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each seed, the least-squares slope of its values over x.

    >>> slopes([0.0, 1.0], [[1.0, 3.0], [3.0, 2.0]])
    [2.0, -1.0]
    """
    centre = fmean(x)
    scale = sum((at - centre) ** 2 for at in x)
    return [
        sum((at - centre) * value for at, value in zip(x, values, strict=True)) / scale
        for values in zip(*rows, strict=True)
    ]


def rises(
    statement: str, paper: str, x: Sequence[float], rows: Sequence[Sequence[float] | None]
) -> Claim:
    """Compare the slope over x of every seed with 0."""
    present = [row for row in rows if row]
    if len(present) < len(rows):
        return Claim(statement, paper, "", "not run", "a run is missing")
    found = slopes(x, present)
    values = ", ".join(spread(row) for row in present)
    claim = compare(statement, paper, found, 0.0)
    return replace(claim, ours=f"{values}; slope {spread(found)}")


def number(
    statement: str, paper: float, ours: float | None, tolerance: float = 0.02, note: str = ""
) -> Claim:
    """Compare a number with the paper's, within a relative tolerance."""
    if ours is None:
        return Claim(statement, f"{paper:.3f}", "", "not run", note)
    held = abs(ours - paper) <= tolerance * paper
    return Claim(statement, f"{paper:.3f}", f"{ours:.3f}", verdict(held), note)


def verdict(held: bool) -> Verdict:
    """Return the word for the outcome of a comparison."""
    return "held" if held else "did not hold"
