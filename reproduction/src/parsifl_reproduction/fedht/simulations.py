"""Fed-HT's simulations I (regression) and II (classification): Figures 3 and 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.data.registry import load
from parsifl.linear.glm import GLM
from parsifl_reproduction.fedht.setup import (
    METHODS,
    PAPER,
    RATES,
    STEPS,
    Setting,
    all_training,
    best,
    curve,
    grid,
    objectives,
    rounds_to,
)
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values

TAU, BATCH, L2 = 200, 50, 1e-4


@dataclass(frozen=True)
class Simulation:
    """One simulation, and what the paper says of it: rounds of each method, to equal the last."""

    name: str
    dataset: str
    rounds: int
    fed_ht: int | None
    fed_iter_ht: int
    tried: str
    """What else was tried (at the small scale, last objectives on seed 0)."""

    def data(self, context: Context, seed: int) -> ClientData:
        """Draw the clients; the small scale has 30 of them, and 200 samples each in II."""
        sizes: dict[str, Any] = {} if context.scale == "full" else {"clients": 30}
        if sizes and self.name == "II":
            sizes["samples"] = 200
        made = load(self.dataset, seed=seed, **sizes)
        owners = np.asarray(made.groups)
        parts = [np.flatnonzero(owners == client) for client in range(owners.max() + 1)]
        data = ClientData.from_dataset(made, parts, test=0.0, key=Key(seed, purpose="fedht"))
        return all_training(data)

    def problem(self) -> GLM:
        """Return the paper's loss: no 1/2 in the squared one, l2 = 1e-4 in the logistic one."""
        return GLM(1000, "squared") if self.name == "I" else GLM(1000, "logistic", l2=L2)

    def settings(self, context: Context) -> list[Setting]:
        """Return the paper's grid, or its middle."""
        if context.scale == "full":
            return grid(STEPS, RATES)
        return grid((3, 10), (0.1, 0.01, 0.001))


SIMULATIONS = (
    Simulation(
        "I",
        "fedht-regression",
        100,
        60,
        20,
        "full batches (Fed-HT K=3 diverges from lr=0.003 on, and ends at 8.0 with 0.001: it is not "
        "the noise of mini-batches); lr=0.003 and 0.0003, which the paper's grid leaves out "
        "(FedIter-HT K=3 lr=0.003 ends at 4.19, nearest to Distributed-IHT's 4.13); the theory's "
        "step 1/(6l) with growing batches (18 to 52); alpha and beta as variances (Fed-HT K=3 ends "
        "at 22 with lr=0.001 and diverges with 0.003, Distributed-IHT ends at 4.3)",
    ),
    Simulation(
        "II",
        "fedht-classification",
        200,
        None,
        50,
        "the theory's step 1/(6l) with growing batches (0.47 to 0.59); Distributed-IHT with "
        "lr=0.03, for which it ends still lower (0.326)",
    ),
)


def _run(
    simulation: Simulation, setting: Setting, context: Context, seed: int, _folder: Path | None
) -> Values:
    rounds = simulation.rounds if context.scale == "full" else simulation.rounds // 2
    data = simulation.data(context, seed)
    return objectives(setting, simulation.problem(), data, TAU, BATCH, rounds, seed)


def _plan(simulation: Simulation, context: Context) -> list[Job]:
    return [
        Job(setting.label, seed, partial(_run, simulation, setting, context, seed))
        for setting in simulation.settings(context)
        for seed in range(context.seeds)
    ]


def _conclude(simulation: Simulation, context: Context, results: Sequence[Result]) -> list[Claim]:
    settings = simulation.settings(context)
    chosen = {method: best(results, settings, method) for method in METHODS}
    curves = {method: curve(results, setting.label) for method, setting in chosen.items()}
    target = curves["Distributed-IHT"][-1]
    total = len(curves["Distributed-IHT"]) * 5
    diverged = [s.label for s in settings if not math.isfinite(curve(results, s.label)[-1])]
    tried = f"diverged: {', '.join(diverged) or 'none'}. Tried besides: {simulation.tried}"
    claims = []
    for method, paper in (("Fed-HT", simulation.fed_ht), ("FedIter-HT", simulation.fed_iter_ht)):
        if paper is None:
            continue
        reached = rounds_to(curves[method], target)
        ours = "never" if reached is None else f"after {reached} rounds"
        claims.append(
            Claim(
                f"simulation {simulation.name}: {method} reaches the objective of Distributed-IHT "
                "in fewer rounds (best step size and K of each)",
                f"{paper} rounds against {simulation.rounds}",
                f"{ours}, against {total}: {chosen[method].label} ends at "
                f"{curves[method][-1]:.4g}, {chosen['Distributed-IHT'].label} at {target:.4g}",
                "held" if reached is not None and reached < total else "did not hold",
                tried,
            )
        )
    return claims


RECIPES = tuple(
    Recipe(
        f"fedht-simulation-{simulation.name.lower()}",
        f"Fed-HT's simulation {simulation.name} (Figures 3 and 4)",
        PAPER,
        partial(_plan, simulation),
        partial(_conclude, simulation),
    )
    for simulation in SIMULATIONS
)
