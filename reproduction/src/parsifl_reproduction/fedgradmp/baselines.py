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
from parsifl.algorithms.fedmid import FedMid
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.core.algorithm import AnyAlgorithm
from parsifl_reproduction.fedgradmp.setup import PAPER, Recovery, final, rounds_until, scientific
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values

FIGURES: dict[str, tuple[Recovery, int]] = {
    "3": (Recovery(0.2, decay=0.2, sparsity=15), 10),
    "4": (Recovery(0.5, decay=0.2, sparsity=15), 10),
    "5": (Recovery(0.5, decay=0.2, sparsity=400), 12),
}
RATES = (0.0001, 0.0005, 0.001, 0.002, 0.004, 0.01, 0.02)
WIDER = (*RATES, 0.05)
"""One more for Figures 3 to 5, whose rates the paper does not give: 0.02 was the best of RATES."""
OURS, BATCH = "FedGradMP", 40


def _rates(figure: str, context: Context) -> tuple[float, ...]:
    if context.scale == "full":
        return WIDER
    return RATES[:5] if figure == "5" else WIDER[-4:]  # with tau = 400, 0.004 is too long a step


def _factor(context: Context) -> int:
    """Return how many times the rounds the baselines get: a gradient step is cheap."""
    return 10 if context.scale == "full" else 4


def _methods(figure: str, rate: float) -> dict[str, AnyAlgorithm]:
    tau = FIGURES[figure][0].sparsity
    ours: AnyAlgorithm = FedGradMP(tau=tau, local_steps=3, batch_size=BATCH)
    if figure == "5":
        ours = InexactFedGradMP(
            tau=tau, local_steps=3, batch_size=BATCH, solver="gd", inner_steps=50
        )
    return {
        OURS: ours,
        "FedIterHT": FedIterHT(tau=tau, lr=rate, local_steps=3, batch_size=BATCH),
        "FedMid": FedMid(tau=tau, prox="hard", lr=rate, local_steps=3, batch_size=BATCH),
        "FedDualAvg": FedDualAvg(tau=tau, prox="hard", lr=rate, local_steps=3, batch_size=BATCH),
    }


def _run(
    figure: str, name: str, rate: float, factor: int, seed: int, _folder: Path | None
) -> Values:
    case, rounds = FIGURES[figure]
    return case.errors(_methods(figure, rate)[name], factor * rounds, seed)


def _plan(figure: str, context: Context) -> list[Job]:
    jobs = []
    for name in _methods(figure, 0.01):
        factor = 1 if name == OURS else _factor(context)
        for rate in (0.01,) if name == OURS else _rates(figure, context):
            label = name if name == OURS else f"{name} lr={rate}"
            jobs += [
                Job(label, seed, partial(_run, figure, name, rate, factor, seed))
                for seed in range(context.seeds)
            ]
    return jobs


def _conclude(figure: str, context: Context, results: Sequence[Result]) -> list[Claim]:
    ours = final(results, OURS)
    rounds = FIGURES[figure][1]
    claims = []
    for name in ("FedIterHT", "FedMid", "FedDualAvg"):
        labels = {rate: f"{name} lr={rate}" for rate in _rates(figure, context)}
        best = min(labels, key=lambda rate: median(final(results, labels[rate])))
        theirs = _errors_at(results, labels[best], rounds)
        longer = final(results, labels[best])
        claims.append(
            Claim(
                f"after {rounds} rounds FedGradMP is nearer to the truth than {name} at its best "
                "learning rate",
                f"FedGradMP is below all baselines (Figure {figure})",
                f"{scientific(ours)} against {scientific(theirs)} (lr {best})",
                "held" if max(ours) < min(theirs) else "did not hold",
                f"with {_factor(context)} times the rounds {name} reaches {scientific(longer)}",
            )
        )
        claims.append(_sooner(figure, name, results, labels[best]))
    return claims


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
        "held" if all(a < b for a, b in pairs) else "did not hold",
        "times of whole simulated rounds in one process, judging left out",
    )


def _seconds_until(values: Values, target: float) -> float:
    reached = rounds_until(values, target)
    return math.inf if reached is None else reached * values["seconds"] / len(values["errors"])


def _errors_at(results: Sequence[Result], label: str, round: int) -> list[float]:
    found = [r.values["errors"][round - 1] for r in results if r.label == label]
    return [error if math.isfinite(error) else math.inf for error in found]


READINGS = {"mean": 1, "sum": BATCH}
"""How a mini-batch's gradient is read, and by what that multiplies the step size."""


def _tune(rate: float, factor: int, seed: int, _folder: Path | None) -> Values:
    method = FedIterHT(tau=10, lr=rate * factor, local_steps=3, batch_size=BATCH)
    return Recovery(1.0, clients=30).errors(method, 60, seed)


def _tuned(reading: str, rate: float) -> str:
    return f"lr={rate}" if reading == "mean" else f"{reading} lr={rate}"


def _plan_rates(context: Context) -> list[Job]:
    return [
        Job(_tuned(reading, rate), seed, partial(_tune, rate, factor, seed))
        for reading, factor in READINGS.items()
        for rate in RATES
        for seed in range(context.seeds)
    ]


def _conclude_rates(_context: Context, results: Sequence[Result]) -> list[Claim]:
    return [claim for reading in READINGS for claim in _conclude_reading(reading, results)]


def _conclude_reading(reading: str, results: Sequence[Result]) -> list[Claim]:
    errors = {rate: final(results, _tuned(reading, rate)) for rate in RATES}
    small = [error for rate in RATES[:4] for error in errors[rate]]
    large = [error for rate in RATES[4:] for error in errors[rate]]
    how = f"gradients that are the {reading} over the mini-batch"
    why = {
        "mean": "as the loss is printed, f_i = |A x - y|^2 / (2 |D_i|): the errors stay near 1, "
        "for H_tau leaves 10 coordinates, on which these rates are not too long. Tried: the sum",
        "sum": "not what is printed, but it diverges where the figure does (and at 0.002 too)",
    }
    return [
        Claim(
            f"FedIterHT diverges at learning rates 0.004 and above ({how})",
            "they quickly diverge (Figure 8, top)",
            scientific(large),
            "held" if min(large) > 1.0 else "did not hold",
            why[reading],
        ),
        Claim(
            f"at smaller ones its error is still above 0.01 after 60 rounds ({how})",
            "a highly suboptimal local solution (Figure 8, bottom)",
            scientific(small),
            "held" if min(small) > 0.01 else "did not hold",
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
        )
        for figure in FIGURES
    ),
    Recipe(
        "fedgradmp-figure8",
        "The learning rate of FedIterHT",
        PAPER,
        _plan_rates,
        _conclude_rates,
    ),
)
