"""Tables 1, 3, 4, 7 and 9 of PerFedMask's paper: accuracies after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from parsifl_reproduction.perfedmask.claims import Published, column, in_order, verdict
from parsifl_reproduction.perfedmask.setup import PAPER, SEVEN, Cell, plan
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, by_label, spread

_ACCURACY_1 = {
    ("CIFAR-10", 1.0): (88.43, 88.20, 84.96, 84.26, 87.33, 85.56, 84.99),
    ("CIFAR-10", 0.1): (83.60, 84.27, 74.55, 71.88, 73.34, 77.76, 71.19),
    ("CIFAR-100", 1.0): (72.40, 69.01, 64.63, 65.24, 68.65, 65.95, 65.27),
    ("CIFAR-100", 0.1): (67.47, 66.32, 59.36, 60.42, 65.87, 62.35, 59.12),
}
TABLE_1: Published = {
    Cell(data, method, part): value
    for (data, part), row in _ACCURACY_1.items()
    for method, value in zip(SEVEN, row, strict=True)
}
TABLE_7: Published = {
    Cell("DomainNet", method): value
    for method, value in zip(SEVEN, (70.68, 72.29, 71.95, 72.85, 67.68, 68.44, 72.24), strict=True)
}
_STEPS = (0, 2, 4, 6, 8, 10)
_ACCURACY_3 = {
    ("CIFAR-10", "perfedmask"): (70.14, 88.78, 88.69, 88.35, 88.25, 88.30),
    ("CIFAR-10", "fedbabu"): (69.27, 88.63, 88.38, 88.43, 88.12, 87.92),
    ("CIFAR-100", "perfedmask"): (32.04, 72.62, 72.84, 72.48, 72.11, 72.40),
    ("CIFAR-100", "fedbabu"): (29.70, 69.03, 69.15, 68.86, 68.83, 68.81),
}
TABLE_3: Published = {
    Cell(data, method, tune_epochs=steps): value
    for (data, method), row in _ACCURACY_3.items()
    for steps, value in zip(_STEPS, row, strict=True)
}
_TABLE_4_BEFORE = {0.2: 29.29, 0.4: 32.31, 0.6: 32.79, 0.8: 33.59, 1.0: 34.73}
TABLE_4: Published = {
    Cell("CIFAR-100", "perfedmask", nu=nu): value for nu, value in _TABLE_4_BEFORE.items()
}
TABLE_9: Published = {
    Cell("CIFAR-10", "perfedmask", 0.1): 83.60,
    Cell("CIFAR-10", "perfedmask", 1.0): 88.43,
    Cell("CIFAR-100", "perfedmask", 0.1): 67.47,
    Cell("CIFAR-100", "perfedmask", 1.0): 72.40,
    Cell("CIFAR-10", "perfedmask head", 0.1): 71.56,
    Cell("CIFAR-10", "perfedmask head", 1.0): 85.76,
    Cell("CIFAR-100", "perfedmask head", 0.1): 54.85,
    Cell("CIFAR-100", "perfedmask head", 1.0): 67.89,
}


def _plan(published: Published, context: Context) -> list[Job]:
    return plan(list(published), context)


def _conclude(published: Published, context: Context, results: Sequence[Result]) -> list[Claim]:
    return in_order(context, results, published, "perfedmask", "after")


def _conclude_tuning(context: Context, results: Sequence[Result]) -> list[Claim]:
    """Two epochs of fine-tuning are worth nearly as much as ten."""
    grouped = by_label(results)
    claims: dict[str, Claim] = {}
    for (data, method), row in _ACCURACY_3.items():
        cells = [Cell(data, method, tune_epochs=n).at(context) for n in (0, 2, 10)]
        none, few, many = (column(grouped, cell.label, "after") for cell in cells)
        statement = f"{cells[0].federation}, {method}: 2 epochs of fine-tuning gain most"
        paper = f"{row[0]:g}, {row[1]:g} and {row[-1]:g} after 0, 2 and 10"
        if not none or not few or not many:
            claims.setdefault(statement, Claim(statement, paper, "", "not run"))
            continue
        gained, later = _gain(few, none), _gain(many, few)
        ours = f"{spread(none)}, {spread(few)} and {spread(many)}"
        claim = Claim(statement, paper, ours, verdict(gained > abs(later)))
        claims.setdefault(statement, claim)
    return [*claims.values(), *in_order(context, results, TABLE_3, "perfedmask", "after")]


def _gain(after: Sequence[float], before: Sequence[float]) -> float:
    return sum(after) / len(after) - sum(before) / len(before)


def _conclude_strength(context: Context, results: Sequence[Result]) -> list[Claim]:
    """More strong devices give a better global model."""
    grouped = by_label(results)
    cells = [cell.at(context) for cell in TABLE_4]
    found = [column(grouped, cell.label, "before") for cell in cells]
    statement = "the global model gets better as nu grows from 0.2 to 1"
    paper = ", ".join(f"{value:g}" for value in _TABLE_4_BEFORE.values())
    if not all(found):
        return [Claim(statement, paper, "", "not run")]
    ours = ", ".join(spread(part) for part in found if part)
    means = [sum(part) / len(part) for part in found if part]
    rises = sum(b > a for a, b in pairwise(means))
    note = f"{rises} of {len(means) - 1} steps go up"
    return [Claim(statement, paper, ours, verdict(means[-1] > means[0]), note)]


def _recipe(name: str, title: str, published: Published) -> Recipe:
    return Recipe(
        f"perfedmask-{name}", title, PAPER, partial(_plan, published), partial(_conclude, published)
    )


RECIPES = (
    _recipe("table1", "Seven methods on CIFAR-10 and CIFAR-100, unequal devices", TABLE_1),
    replace(_recipe("table3", "Fine-tuning steps", TABLE_3), conclude=_conclude_tuning),
    replace(
        _recipe("table4", "More devices of full strength", TABLE_4), conclude=_conclude_strength
    ),
    _recipe("table7", "Seven methods on DomainNet with AlexNet", TABLE_7),
    _recipe("table9", "With and without a frozen head", TABLE_9),
)
