"""Tables 3 to 8 of FedSLR's paper: what its penalties, its step and its local work do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedslr.setup import (
    HUGE,
    PAPER,
    Cell,
    cell,
    column,
    falling,
    plan,
    swept,
)
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, by_label


@dataclass(frozen=True)
class Sweep:
    """One setting of FedSLR that is varied, with what else is fixed."""

    field: str
    full: tuple[float, ...]
    small: tuple[float, ...]
    fixed: tuple[tuple[str, float], ...] = ()

    def steps(self, context: Context) -> tuple[float, ...]:
        """Return the values of a scale."""
        return self.full if context.scale == "full" else self.small

    def cell(self, context: Context, value: float) -> Cell:
        """Return the training of one step."""
        changes = {**dict(self.fixed), self.field: value}
        return cell(swept(context), "Non-IID", "fedslr", context, **changes)

    def name(self, value: float) -> str:
        """Return a step in short."""
        return f"{self.field}={value:g}"


RANKS = Sweep("lam", (1e-5, 5e-5, 1e-4, 5e-4, 1e-3), (1e-4, 1e-3, 3e-3, 1e-2))
SPARSE = Sweep("mu", (1e-4, 5e-4, 1e-3, 5e-3, 1e-2), (1e-4, 1e-3, 1e-2))
STEPS = Sweep("eta_g", (2.0, 10.0, 20.0, 100.0), (2.0, 10.0, 50.0))
EPOCHS = Sweep("epochs", (1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 4.0))
PURE_PERSONAL = Sweep("mu", (1e-3, 1e-4, 1e-5), (1e-2, 1e-3, 1e-4), (("lam", HUGE),))
# the global model never reads personal components: with a huge mu it is that of Table 3, bit by bit
PURE_GLOBAL = Sweep("lam", (1e-3, 1e-4, 1e-5), (1e-2, 1e-3, 1e-4))


def _plan(context: Context, sweep: Sweep) -> list[Job]:
    return plan([sweep.cell(context, step) for step in sweep.steps(context)], context)


def _by_step(
    context: Context, results: Sequence[Result], sweep: Sweep, key: str
) -> dict[str, list[float]]:
    grouped = by_label(results)
    return {
        sweep.name(step): column(grouped, sweep.cell(context, step).label, key)
        for step in sweep.steps(context)
    }


def _table3(context: Context, results: Sequence[Result]) -> list[Claim]:
    return [
        falling("the global model shrinks as lambda grows", "7.33, 6.56, 5.54, 3.09, 1.27 M",
                _by_step(context, results, RANKS, "parameters")),
        falling("the mixed model shrinks as lambda grows", "8.54, 7.83, 6.69, 4.04, 2.24 M",
                _by_step(context, results, RANKS, "mixed_parameters")),
        falling("fewer bytes go down as lambda grows", "819, 770, 723, 568, 498 GB in all",
                _by_step(context, results, RANKS, "bytes_down")),
        _last_is_worse(context, results, RANKS, "the largest lambda costs the global model points",
                       "64.22 against 54.26", "global"),
    ]  # fmt: skip


def _table4(context: Context, results: Sequence[Result]) -> list[Claim]:
    return [
        falling("the mixed model shrinks as mu grows", "8.50, 7.12, 6.69, 5.78, 5.56 M",
                _by_step(context, results, SPARSE, "mixed_parameters")),
        _last_is_worse(context, results, SPARSE, "the largest mu costs the mixed model accuracy",
                       "82.19 against 80.81", "personal"),
    ]  # fmt: skip


def _table5(context: Context, results: Sequence[Result]) -> list[Claim]:
    return [
        falling("the global model shrinks as eta_g grows", "10.65, 5.54, 5.16, 2.99 M",
                _by_step(context, results, STEPS, "parameters")),
        _last_is_worse(context, results, STEPS, "the largest eta_g costs the global model accuracy",
                       "64.22 against 58.69", "global"),
    ]  # fmt: skip


def _table6(context: Context, results: Sequence[Result]) -> list[Claim]:
    scores = {
        model: list(_by_step(context, results, EPOCHS, model).values())
        for model in ("global", "personal")
    }
    return [
        compare("two local epochs are better than one for the global model", "64.51 against 58.20",
              scores["global"][1], scores["global"][0]),
        compare("two local epochs are better than one for the mixed model", "81.46 against 78.82",
              scores["personal"][1], scores["personal"][0]),
    ]  # fmt: skip


def _table7(context: Context, results: Sequence[Result]) -> list[Claim]:
    return [
        _last_is_worse(context, results, PURE_PERSONAL,
                       "without a global model, the largest mu is worse than the smallest",
                       "44.54 against 37.14", "personal", worst_first=True),
    ]  # fmt: skip


def _table8(context: Context, results: Sequence[Result]) -> list[Claim]:
    return [
        _last_is_worse(context, results, PURE_GLOBAL,
                       "without personal components, the largest lambda is the worst",
                       "64.22 against 54.26", "global", worst_first=True),
    ]  # fmt: skip


def _last_is_worse(
    context: Context, results: Sequence[Result], sweep: Sweep, statement: str, paper: str,
    model: str, *, worst_first: bool = False,
) -> Claim:  # fmt: skip
    """Compare the harshest step of a sweep with the best of the others, seed by seed."""
    others = list(_by_step(context, results, sweep, model).values())
    harshest = others.pop(0 if worst_first else -1)
    return compare(statement, paper, max(others, key=sum), harshest)


RECIPES = (
    Recipe("fedslr-table3", "Low-rank penalty", PAPER, partial(_plan, sweep=RANKS), _table3),
    Recipe("fedslr-table4", "Sparse penalty", PAPER, partial(_plan, sweep=SPARSE), _table4),
    Recipe("fedslr-table5", "Proximal step", PAPER, partial(_plan, sweep=STEPS), _table5),
    Recipe("fedslr-table6", "Local epochs", PAPER, partial(_plan, sweep=EPOCHS), _table6),
    Recipe(
        "fedslr-table7", "Pure personalisation", PAPER, partial(_plan, sweep=PURE_PERSONAL), _table7
    ),
    Recipe("fedslr-table8", "Pure global", PAPER, partial(_plan, sweep=PURE_GLOBAL), _table8),
)
