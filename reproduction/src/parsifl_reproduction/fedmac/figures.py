"""Figures 2 and 3 of FedMac's paper: the effect of R and beta, and convergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedmac.setup import (
    PAPER,
    TABLE_2,
    TABLE_3,
    TITLES,
    column,
    job,
)
from parsifl_reproduction.recipe import (
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    by_label,
    spread,
)

LOCAL_STEPS = (5, 10, 20, 40)
BETAS = (1.0, 2.0, 4.0)
GLOBAL_GOAL = 90.0

FIGURE_3 = {
    ("fedmac", "global"): 1.79,
    ("pfedme", "personal"): 0.55,
    ("pfedme", "global"): 2.29,
    ("perfedavg", "personal"): 0.75,
    ("heurfedamp", "personal"): 0.13,
    ("fedprox", "global"): 1.96,
    ("fedavg", "global"): 1.92,
}
"""By how many points FedMac's personal model is better, as the text says."""


def _rounds(context: Context, full: int = 800) -> int:
    return 100 if context.scale != "full" else full


def _plan_figure_2(context: Context) -> list[Job]:
    base = TABLE_2["fedmac"]
    changes: list[Values] = [{"local_steps": steps} for steps in LOCAL_STEPS]
    changes += [{"beta": beta} for beta in BETAS]
    return [
        job(_label(change), "MNIST", "fedmac", {**base, **change}, seed, _rounds(context), context)
        for seed in range(context.seeds)
        for change in changes
    ]


def _label(change: Values) -> str:
    return " ".join(f"{name}={value:g}" for name, value in change.items())


def rounds_to(goal: float, curve: Sequence[Sequence[float]]) -> float:
    """Return the first judged round that reaches a score; the last one if none does.

    >>> rounds_to(90.0, [[10, 80.0], [20, 91.0], [30, 95.0]])
    20
    """
    return next((round for round, score in curve if score >= goal), curve[-1][0])


def _conclude_figure_2(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    needed = {
        steps: [rounds_to(GLOBAL_GOAL, run["global_curve"]) for run in grouped.get(label, ())]
        for steps, label in ((steps, _label({"local_steps": steps})) for steps in LOCAL_STEPS)
    }
    few, many = needed[LOCAL_STEPS[0]], needed[LOCAL_STEPS[-1]]
    small, large = _label({"beta": BETAS[0]}), _label({"beta": BETAS[-1]})
    return [
        compare(
            f"a larger R needs fewer rounds (to {GLOBAL_GOAL:g} % of the global model)",
            f"Figure 2: R = {LOCAL_STEPS[0]} against R = {LOCAL_STEPS[-1]}",
            few,
            many,
        ),
        compare(
            "a larger beta improves the global model",
            f"Figure 2: beta = {BETAS[-1]:g} against beta = {BETAS[0]:g}",
            column(grouped, large, "global"),
            column(grouped, small, "global"),
        ),
        compare(
            "a larger beta weakens the personal model",
            f"Figure 2: beta = {BETAS[0]:g} against beta = {BETAS[-1]:g}",
            column(grouped, small, "personal"),
            column(grouped, large, "personal"),
        ),
    ]


def _plan_figure_3(context: Context) -> list[Job]:
    return [
        job(method, "MNIST", method, options, seed, _rounds(context), context)
        for seed in range(context.seeds)
        for method, options in TABLE_3.items()
    ]


def _conclude_figure_3(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    ours = column(grouped, "fedmac", "personal")
    return [
        _gap_claim(method, model, gap, ours, column(grouped, method, model))
        for (method, model), gap in FIGURE_3.items()
    ]


def _gap_claim(
    method: str, model: str, gap: float, ours: list[float] | None, theirs: list[float] | None
) -> Claim:
    claim = compare(
        f"FedMac's personal model is better than the {model} one of {TITLES[method]}",
        f"{gap:.2f} points",
        ours,
        theirs,
    )
    if not ours or not theirs:
        return claim
    gaps = [a - b for a, b in zip(ours, theirs, strict=False)]
    note = f"{claim.note}; the paper's gap is {gap:.2f}, ours {spread(gaps)}"
    return replace(claim, note=note)


RECIPES = (
    Recipe(
        "fedmac-figure2",
        "Effect of the local steps R and of beta on FedMac",
        PAPER,
        _plan_figure_2,
        _conclude_figure_2,
    ),
    Recipe(
        "fedmac-figure3",
        "Convergence of six methods on MNIST",
        PAPER,
        _plan_figure_3,
        _conclude_figure_3,
    ),
)
