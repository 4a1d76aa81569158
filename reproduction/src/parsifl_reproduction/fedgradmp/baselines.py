"""FedGradMP against its baselines: Figures 3, 4, 5 and 8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from parsifl.algorithms.feddualavg import FedDualAvg
from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.core.algorithm import AnyAlgorithm
from parsifl_reproduction.comparison import agreed
from parsifl_reproduction.fedgradmp.recovery import context_case
from parsifl_reproduction.fedgradmp.setup import (
    PAPER,
    Recovery,
    errors_at,
    final,
    rounds_until,
    scientific,
)
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values

FIGURES: dict[str, tuple[Recovery, int]] = {
    "3": (Recovery(0.2, decay=0.2, sparsity=15), 10),
    "4": (Recovery(0.5, decay=0.2, sparsity=15), 10),
    "5": (Recovery(0.5, decay=0.2, sparsity=400), 12),
}
RATES = (0.0005, 0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2)
"""The paper gives no rates for Figures 3 to 5: the grid ends where every baseline diverges."""
FIGURE_8 = (0.0001, 0.0005, 0.001, 0.002, 0.004, 0.01, 0.02)
OURS, BATCH, INNER, LONGER = "FedGradMP", 40, 10, 4
BASELINES = ("FedIterHT", "FedMid", "FedDualAvg")
SAME = {"FedMid": "FedIterHT"}
"""FedMid with the hard prox and a server step of 1 is FedIterHT: it is run and counted once."""
OTHER_TAU = 200
"""The sparsity of FedIterHT in its own paper, whose data Figure 8 resembles."""


def _method(name: str, tau: int, rate: float, inexact: bool) -> AnyAlgorithm:
    common: Values = {"tau": tau, "local_steps": 3, "batch_size": BATCH}
    if name == OURS and inexact:
        return InexactFedGradMP(**common, solver="gd", inner_steps=INNER)
    if name == OURS:
        return FedGradMP(**common)
    drawn: Values = {**common, "lr": rate, "last_batch": "redraw"}
    return FedIterHT(**drawn) if name == "FedIterHT" else FedDualAvg(prox="hard", **drawn)


def _run(
    case: Recovery, name: str, rate: float, rounds: int, seed: int, _folder: Path | None
) -> Values:
    method = _method(name, case.sparsity, rate, inexact=case.sparsity > 100)
    return case.errors(method, rounds, seed)


def _plan(figure: str, context: Context) -> list[Job]:
    case, rounds = FIGURES[figure]
    case, rates = context_case(context, case), RATES[:1] if context.smoke else RATES
    jobs = []
    for seed in range(context.seeds):
        jobs.append(Job(OURS, seed, partial(_run, case, OURS, 0.0, rounds, seed)))
        jobs += [
            Job(f"{name} lr={rate}", seed, partial(_run, case, name, rate, LONGER * rounds, seed))
            for name in BASELINES
            if name not in SAME
            for rate in rates
        ]
    return jobs


def _conclude(figure: str, _context: Context, results: Sequence[Result]) -> list[Claim]:
    return [claim for name in BASELINES for claim in _against(figure, name, results)]


def _against(figure: str, name: str, results: Sequence[Result]) -> list[Claim]:
    rounds = FIGURES[figure][1]
    labels = {rate: f"{SAME.get(name, name)} lr={rate}" for rate in RATES}
    ran = {rate: ends for rate, label in labels.items() if (ends := final(results, label))}
    best = min(ran, key=lambda rate: median(ran[rate]), default=RATES[0])
    ours, theirs = final(results, OURS), errors_at(results, labels[best], rounds)
    longer = ran.get(best, [])
    edge = "; the best rate is at the end of the grid" if best in (RATES[0], RATES[-1]) else ""
    nearer = Claim(
        f"after {rounds} rounds FedGradMP is nearer to the truth than {name} at its best learning "
        "rate",
        f"FedGradMP is below all baselines (Figure {figure})",
        f"{scientific(ours)} against {scientific(theirs)} (lr {best})",
        agreed([a < b for a, b in zip(ours, theirs, strict=False)]),
        f"with {LONGER} times the rounds {name} reaches {scientific(longer)}{edge}",
        _counted(figure, name),
    )
    return [nearer, _sooner(figure, name, results, labels[best])]


def _counted(figure: str, name: str) -> str:
    return f"fedgradmp-figure{figure} ({SAME[name]}: the same method)" if name in SAME else ""


def _sooner(figure: str, name: str, results: Sequence[Result], label: str) -> Claim:
    """Compare by time: how soon FedGradMP is where the baseline is at its end."""
    pairs = [
        (_seconds_until(mine.values, theirs.values["errors"][-1]), theirs.values["seconds"])
        for mine in results
        for theirs in results
        if mine.label == OURS and theirs.label == label and mine.seed == theirs.seed
    ]
    shown = ", ".join("never" if math.isinf(a) else f"{a / b:.2f}" for a, b in pairs)
    return Claim(
        f"FedGradMP needs less time to the last error of {name} than {name} itself",
        f"faster in wall-clock time too (Figure {figure})",
        f"ratio of the times by seed: {shown}",
        agreed([a < b for a, b in pairs]),
        "CPU time of simulated rounds in one process, without evaluation",
        _counted(figure, name),
    )


def _seconds_until(values: Values, target: float) -> float:
    reached = rounds_until(values, target)
    return math.inf if reached is None else reached * values["seconds"] / len(values["errors"])


def _deviations(figure: str, _context: Context) -> list[str]:
    found = [
        f"The paper does not give the baselines' rates: the best of {len(RATES)} from {RATES[0]:g} "
        f"to {RATES[-1]:g} is taken, by the error after {LONGER} times the rounds.",
    ]
    if figure == "5":
        found.append(f"{INNER} inner gradient steps; the paper says 'gradient descent' only.")
    return found


# ----------------------------------------------------------------------------------- Figure 8
def _tune(case: Recovery, tau: int, rate: float, seed: int, _folder: Path | None) -> Values:
    method = FedIterHT(tau=tau, lr=rate, local_steps=3, batch_size=BATCH, last_batch="redraw")
    return case.errors(method, 60, seed)


def _tune_dual(case: Recovery, tau: int, rate: float, seed: int, _folder: Path | None) -> Values:
    method = FedDualAvg(
        prox="hard", tau=tau, lr=rate, local_steps=3, batch_size=BATCH, last_batch="redraw"
    )
    return case.errors(method, 60, seed)


def _plan_rates(context: Context) -> list[Job]:
    case = context_case(context, Recovery(1.0, clients=30))
    return [
        Job(
            f"{label}lr={rate}",
            seed,
            partial(run, case, min(OTHER_TAU, case.dimension), rate, seed),
        )
        for label, run in (("", _tune), ("FedDualAvg ", _tune_dual))
        for rate in (FIGURE_8[:1] if context.smoke else FIGURE_8)
        for seed in range(context.seeds)
    ]


def _conclude_rates(_context: Context, results: Sequence[Result]) -> list[Claim]:
    others = "the same phenomenon for other baseline algorithms (V-C)"
    return [
        *_rate_claims("FedIterHT", "", results, "they quickly diverge (Figure 8, top)",
                      "a highly suboptimal local solution (Figure 8, bottom)"),
        *_rate_claims("FedDualAvg", "FedDualAvg ", results, others, others),
    ]  # fmt: skip


def _rate_claims(
    name: str, label: str, results: Sequence[Result], diverges: str, stays: str
) -> list[Claim]:
    errors = {rate: final(results, f"{label}lr={rate}") for rate in FIGURE_8}
    small = [error for rate in FIGURE_8[:4] for error in errors[rate]]
    large = [error for rate in FIGURE_8[4:] for error in errors[rate]]
    return [
        Claim(
            f"{name} diverges at learning rates 0.004 and above",
            diverges,
            scientific(large),
            agreed([error > 1.0 for error in large]),
        ),
        Claim(
            f"{name}: at smaller ones its error is still above 0.01 after 60 rounds",
            stays,
            scientific(small),
            agreed([error > 0.01 for error in small]),
        ),
    ]


RECIPES = (
    *(
        Recipe(
            f"fedgradmp-figure{figure}",
            f"FedGradMP and its baselines, Figure {figure}",
            PAPER,
            partial(_plan, figure),
            partial(_conclude, figure),
            partial(_deviations, figure),
        )
        for figure in FIGURES
    ),
    Recipe(
        "fedgradmp-figure8",
        "The learning rates of FedIterHT and FedDualAvg",
        PAPER,
        _plan_rates,
        _conclude_rates,
        lambda _context: [
            f"The paper gives no tau: {OTHER_TAU} is that of FedIterHT's own paper, "
            "whose data it refers to."
        ],
    ),
)
