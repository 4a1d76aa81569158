"""FedGradMP on handwritten digits by writer: Figures 6 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.feddualavg import FedDualAvg
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.algorithms.fedmid import FedMid
from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.data.registry import load
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.dictionary import gaussian
from parsifl_reproduction.fedgradmp.setup import PAPER
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, spread

WRITERS, UNSEEN, EXAMPLES, COHORT = 350, 50, 100, 10
PIXELS, CLASSES, TAU, RADIUS, BATCH = 784, 10, 90, 1e5, 50
ATOMS, FEW = 200, 10
RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
OURS, RANDOM = "FedGradMP", "FedGradMP, Gaussian dictionary"
BASELINES = ("FedIterHT", "FedMid", "FedDualAvg", "FedAvg")
STAND_IN = "stand-in: MNIST by writer (QMNIST's writers) for Federated EMNIST's digits"


@dataclass(frozen=True)
class Digits:
    """The writers that train, and the digits of 50 others."""

    train: ClientData
    test_x: Tensor
    test_y: Tensor


def digits(context: Context, seed: int) -> Digits:
    """Return 100 digits of each of 350 writers: 300 train, 50 are the test data."""
    made: Any = load("mnist-writers", context.data_dir)
    owners, counts = np.unique(made.groups, return_counts=True)
    draw = Key(seed, purpose="fedgradmp-digits").numpy_generator()
    writers = draw.permutation(owners[counts >= EXAMPLES])[:WRITERS]
    rows = [draw.permutation(np.flatnonzero(made.groups == w))[:EXAMPLES] for w in writers]
    chosen, clients = np.concatenate(rows), WRITERS - UNSEEN
    x = torch.from_numpy(made.x[chosen].reshape(len(chosen), -1)).double() / 255
    y, cut = torch.from_numpy(made.y[chosen]), clients * EXAMPLES
    parts = Ragged.from_sizes(np.arange(cut), np.full(clients, EXAMPLES))
    nobody = Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(clients, np.int64))
    profiles: tuple[dict[str, Any], ...] = ({},) * clients
    train = ClientData(x[:cut], y[:cut], parts, nobody, nobody, profiles, "mnist-writers", CLASSES)
    return Digits(train, x[cut:], y[cut:])


def method(name: str, rate: float) -> AnyAlgorithm:
    """Return a method with 40 effective local iterations a round."""
    if name in (OURS, RANDOM):
        return InexactFedGradMP(
            tau=TAU,
            local_steps=20,
            batch_size=BATCH,
            solver="sgd",
            inner_steps=2,
            inner_batch=BATCH,
            inner_lr=rate,
            radius=RADIUS,
        )
    common: dict[str, Any] = {"lr": rate, "local_steps": 40, "batch_size": BATCH}
    if name == "FedAvg":
        return FedAvg(**common)
    if name == "FedIterHT":
        return FedIterHT(tau=TAU, scope="row", **common)
    kind = FedMid if name == "FedMid" else FedDualAvg
    return kind(tau=TAU, scope="row", prox="hard", **common)


def _run(name: str, rate: float, context: Context, seed: int, _folder: Path | None) -> Values:
    atoms = gaussian(PIXELS, ATOMS, seed) if name == RANDOM else None
    problem = GLM(PIXELS, "softmax", classes=CLASSES, dictionary=atoms)
    data, rounds = digits(context, seed), 1000 if context.scale == "full" else FEW
    cohort = COHORT / (WRITERS - UNSEEN)
    run = simulate(
        method(name, rate),
        problem,
        data.train,
        rounds,
        seed=seed,
        participation=cohort,
        evaluate_every=0,
    )
    params: Params = run.model.params
    pairs = {"train": (data.train.x, data.train.y), "test": (data.test_x, data.test_y)}
    return {
        split: 100 * float((problem.predict(params, x).argmax(-1) == y).double().mean())
        for split, (x, y) in pairs.items()
    }


def _rates(context: Context) -> tuple[float, ...]:
    return RATES if context.scale == "full" else RATES[:4]


def _plan(names: Sequence[str], context: Context) -> list[Job]:
    return [
        Job(f"{name} lr={rate}", seed, partial(_run, name, rate, context, seed))
        for name in names
        for rate in _rates(context)
        for seed in range(context.seeds)
    ]


def best(results: Sequence[Result], name: str) -> tuple[str, dict[str, list[float]]]:
    """Return the best rate of a method by training accuracy, and its accuracies over seeds."""
    labels = {r.label for r in results if r.label.startswith(f"{name} lr=")}
    scores = {
        split: {label: [r.values[split] for r in results if r.label == label] for label in labels}
        for split in ("train", "test")
    }
    chosen = max(sorted(labels), key=lambda label: mean(scores["train"][label]))
    return chosen, {split: found[chosen] for split, found in scores.items()}


def _compare(
    results: Sequence[Result], first: str, second: str, split: str, figure: str, note: str
) -> Claim:
    (label, ours), (other_label, theirs) = best(results, first), best(results, second)
    mine, other = (scores[split.removesuffix("ing")] for scores in (ours, theirs))
    return Claim(
        f"{first} has a higher {split} accuracy than {second}, each at its best step size",
        f"its curve is above (Figure {figure})",
        f"{spread(mine)} ({label}) against {spread(other)} ({other_label})",
        "held" if mean(mine) > mean(other) else "did not hold",
        note,
    )


TRIED = (
    "tried: step sizes 0.03 to 3 (the best is inside the grid), and 60 rounds on seed 0: training "
    "accuracies FedGradMP 88.6, FedIterHT 88.1, FedDualAvg 89.5, FedAvg 91.0, the same order"
)
DENSE = {
    "FedAvg": f"; its model is dense (7,840 coefficients, ours 900); {TRIED}",
    "FedDualAvg": f"; its clients send dense dual vectors, only the model is sparse; {TRIED}",
}


def _conclude6(context: Context, results: Sequence[Result]) -> list[Claim]:
    note = STAND_IN if context.scale == "full" else f"{STAND_IN}; {FEW} rounds instead of 1000"
    return [
        _compare(results, OURS, name, split, "6", note + DENSE.get(name, ""))
        for name in BASELINES
        for split in ("training", "test")
    ]


def _conclude7(context: Context, results: Sequence[Result]) -> list[Claim]:
    note = STAND_IN if context.scale == "full" else f"{STAND_IN}; {FEW} rounds instead of 1000"
    return [_compare(results, RANDOM, OURS, "training", "7", note)]


RECIPES = (
    Recipe(
        "fedgradmp-figure6",
        "Digits by writer: FedGradMP and its baselines (Figure 6)",
        PAPER,
        partial(_plan, (OURS, *BASELINES)),
        _conclude6,
    ),
    Recipe(
        "fedgradmp-figure7",
        "Digits by writer: a Gaussian dictionary of 200 atoms (Figure 7)",
        PAPER,
        partial(_plan, (OURS, RANDOM)),
        _conclude7,
    ),
)
