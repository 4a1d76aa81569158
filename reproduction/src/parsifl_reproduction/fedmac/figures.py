"""Figures 2 and 3 of FedMac's paper: the effect of R and beta, and convergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedmac.setup import (
    DEVIATIONS,
    ONCE,
    PAPER,
    TABLE_2,
    TABLE_3,
    TITLES,
    Training,
    column,
    final,
    job,
)
from parsifl_reproduction.fedmac.table1 import BY_CLIENT, FULL_ROUNDS, MNIST
from parsifl_reproduction.recipe import (
    OURS,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    by_label,
)

LOCAL_STEPS = (5, 20, 40)
BETAS = (1.0, 4.0)
R_ROUNDS, BETA_ROUNDS, LOSS_ROUNDS = 100, 400, 100
GLOBAL_GOAL = 90.0
LATER = (100, 200, 400)

FIGURE_3 = {
    ("fedmac", "global"): 1.79,
    ("pfedme", "personal"): 0.55,
    ("pfedme", "global"): 2.29,
    ("perfedavg", "personal"): 0.75,
    (ONCE, "personal"): 0.13,
    ("fedprox", "global"): 1.96,
    ("fedavg", "global"): 1.92,
}
"""By how many points FedMac's personal model is better, as the text says."""
Planned = tuple[str, Values, int, int]
"""A label, what is changed, rounds, and how often they are evaluated."""


# ---------------------------------------------------------------------------------- Figure 2
def _plan_figure_2(context: Context) -> list[Job]:
    base, full = TABLE_2["fedmac"], context.scale == "full"
    short: list[Planned] = [
        (_steps(steps), {"local_steps": steps}, R_ROUNDS, 20) for steps in LOCAL_STEPS
    ]
    long: list[Planned] = [(_beta(beta), {"beta": beta}, BETA_ROUNDS, 20) for beta in BETAS]
    return [
        job(
            label,
            Training(
                "MNIST",
                "fedmac",
                {**base, **change},
                FULL_ROUNDS if full else rounds,
                every,
                train=True,
            ),
            seed,
            context,
        )
        for seed in range(context.seeds)
        for label, change, rounds, every in (*long, *short)
    ]


def _steps(steps: int) -> str:
    return f"R={steps}"


def _beta(beta: float) -> str:
    return f"beta={beta:g}"


def rounds_to(goal: float, curve: Sequence[Sequence[float]]) -> float:
    """Return the first evaluated round that reaches a score; the last one if none does.

    >>> rounds_to(90.0, [[10, 80.0], [20, 91.0], [30, 95.0]])
    20
    """
    return next((round for round, score in curve if score >= goal), curve[-1][0])


def at_round(round: int, curve: Sequence[Sequence[float]]) -> float:
    """Return the score at a round, or at the last one if training ended before.

    >>> at_round(20, [[10, 80.0], [20, 91.0], [30, 95.0]])
    91.0
    """
    return next((score for at, score in curve if at >= round), curve[-1][1])


def _conclude_figure_2(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)

    def loss(label: str, model: str) -> list[float]:
        return column(grouped, label, final(model, "_loss"), diverged=math.inf)

    def needed(label: str) -> list[float]:
        return column(
            grouped, label, lambda run: rounds_to(GLOBAL_GOAL, run["global_curve"]), math.inf
        )

    def early(label: str, round: int) -> list[float]:
        return column(grouped, label, lambda run: at_round(round, run["personal_curve"]))

    few, many = _steps(LOCAL_STEPS[0]), _steps(LOCAL_STEPS[-1])
    small, large = _beta(BETAS[0]), _beta(BETAS[-1])
    claims = [
        compare(f"a larger R needs fewer rounds (to {GLOBAL_GOAL:g} % of the global model)",
                f"Figure 2: {few} against {many}", needed(few), needed(many)),
        compare(f"a larger R has a smaller training loss after {R_ROUNDS} rounds, global model",
                f"Figure 2: {few} against {many}", loss(few, "global"),
                loss(many, "global")),
        compare("a larger beta improves the global model (best round)",
                f"Figure 2: {large} against {small}", column(grouped, large, "global"),
                column(grouped, small, "global")),
        compare("a larger beta weakens the personal model (best round)",
                f"Figure 2: {small} against {large}", column(grouped, small, "personal"),
                column(grouped, large, "personal")),
    ]  # fmt: skip
    losses = (
        compare(f"a larger beta has a smaller training loss after {BETA_ROUNDS} rounds, global "
                "model", f"Figure 2, bottom, without numbers: {small} against {large}",
                loss(small, "global"), loss(large, "global")),
        compare(f"a larger beta has a larger training loss after {BETA_ROUNDS} rounds, personal "
                "model", f"Figure 2, bottom, without numbers: {large} against {small}",
                loss(large, "personal"), loss(small, "personal")),
    )  # fmt: skip
    claims += [replace(claim, counted=OURS) for claim in losses]
    for round in LATER:
        claim = compare(
            f"a larger beta weakens the personal model (at round {round})",
            f"Figure 2: {small} against {large}",
            early(small, round),
            early(large, round),
        )
        claims.append(replace(claim, counted="the line of the best round"))
    return claims


def _figure_2_deviations(context: Context) -> list[str]:
    rounds = f"{R_ROUNDS} rounds for R and {BETA_ROUNDS} for beta instead of {FULL_ROUNDS}"
    often = "every 20th round is evaluated; the paper takes the best of all"
    losses = (
        "the text names no training loss for beta: its direction is read from 'improve the global "
        "model and weaken the personalized one'"
    )
    more = () if context.scale == "full" else (rounds,)
    return [*more, *DEVIATIONS, often, losses]


# ---------------------------------------------------------------------------------- Figure 3
def _plan_figure_3(context: Context) -> list[Job]:
    losses = [
        job(_loss(method), _loss_training(method, context), seed, context)
        for seed in range(context.seeds)
        for method in TABLE_3
    ]
    return [*MNIST.plan(context), *losses]


def _loss(method: str) -> str:
    return f"training loss of {method}"


def _loss_training(method: str, context: Context) -> Training:
    rounds = FULL_ROUNDS if context.scale == "full" else LOSS_ROUNDS
    return Training("MNIST", method, TABLE_3[method], rounds, 50, train=True)


def _conclude_figure_3(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    ours = column(grouped, MNIST.label("fedmac", BY_CLIENT), "personal")
    gaps = [
        _gap_claim(method, model, gap, ours, grouped) for (method, model), gap in FIGURE_3.items()
    ]
    final = {(method, model): _final_losses(grouped, method, model) for method, model in FIGURE_3}
    mine = _final_losses(grouped, "fedmac", "personal")
    losses = [
        compare(
            f"the training loss of FedMac's personal model is smaller than that of the {model} one "
            f"of {TITLES[method]}",
            "Figure 3, right, without numbers",
            theirs,
            mine,
        )
        for (method, model), theirs in final.items()
    ]
    return [*gaps, *losses]


def _final_losses(grouped: dict[str, list[Values]], method: str, model: str) -> list[float]:
    return column(grouped, _loss(method), final(model, "_loss"), diverged=math.inf)


def _gap_claim(
    method: str,
    model: str,
    gap: float,
    ours: list[float],
    grouped: dict[str, list[Values]],
) -> Claim:
    theirs = column(grouped, MNIST.label(method, BY_CLIENT), model)
    claim = compare(
        f"FedMac's personal model is better than the {model} one of {TITLES[method]}",
        f"{gap:.2f} points",
        ours,
        theirs,
    )
    counted = "fedmac-table1" if model == "personal" else ""
    note = f"{claim.note}; the paper's gap is {gap:.2f}" if claim.left else claim.note
    return replace(claim, note=note, counted=counted)


def _figure_3_deviations(context: Context) -> list[str]:
    rounds = f"training loss after {LOSS_ROUNDS} rounds instead of {FULL_ROUNDS}"
    return [*MNIST.deviations(context), *(() if context.scale == "full" else (rounds,))]


RECIPES = (
    Recipe(
        "fedmac-figure2",
        "Effect of the local steps R and of beta on FedMac",
        PAPER,
        _plan_figure_2,
        _conclude_figure_2,
        _figure_2_deviations,
    ),
    Recipe(
        "fedmac-figure3",
        "Convergence of six methods on MNIST",
        PAPER,
        _plan_figure_3,
        _conclude_figure_3,
        _figure_3_deviations,
    ),
)
