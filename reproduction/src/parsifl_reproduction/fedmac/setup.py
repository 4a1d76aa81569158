"""What the recipes of FedMac's paper share: its federations, settings and cost formula."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import nn

from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ClientError, MissingDataError
from parsifl.data import ClientData, prepare
from parsifl.engine.record import MODELS
from parsifl.engine.run import Run
from parsifl.engine.settings import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.recipe import SKIPPED, Context, Job, Values

PAPER = "Sparse Personalized Federated Learning via Maximizing Correlation (FedMac)"
SMOKE_ROUNDS = 3
DIVERGED = "diverged"
"""The only value of a run in which every client diverged: the reason."""


@dataclass(frozen=True)
class Federation:
    """One row of Table 1: a dataset, how it is divided, and the network.

    The paper says CIFAR-100 with 2 of 10 labels a client; ten labels are CIFAR-10.
    """

    data: str
    clients: int
    cohort: int
    module: Callable[[], nn.Module]
    partition: str | None = "pathological:classes=2"
    test: float = 0.25

    def prepare(self, seed: int, data_dir: str | None) -> ClientData:
        """Load and divide the data; they stay in memory for the next job."""
        return _prepared(self.data, self.clients, self.partition, self.test, seed, data_dir)


@lru_cache(maxsize=1)
def _prepared(
    data: str, clients: int, partition: str | None, test: float, seed: int, data_dir: str | None
) -> ClientData:
    return prepare(data, clients, partition, seed=seed, data_dir=data_dir, test=test)


FEDERATIONS: Mapping[str, Federation] = {
    "MNIST": Federation("mnist", 20, 10, lambda: build("mlp")),
    "FMNIST": Federation("fashion-mnist", 20, 10, lambda: build("mlp")),
    "CIFAR": Federation("cifar-10", 10, 2, lambda: build("vgg")),
    "Synthetic": Federation(
        "synthetic:alpha=0.5,beta=0.5",
        100,
        20,
        lambda: build("mlp", inputs=60, hidden=(20,), classes=10),
        partition=None,
        test=0.1,
    ),
}


ONCE = "heurfedamp-once"


def settings(personal_lr: float, attentive_lam: float) -> dict[str, Values]:
    """Return the settings that Tables 2 and 3 give each method; they differ in two numbers.

    Per-FedAvg's two rates are read as eta for the meta step and eta_p for the adaptation; the
    paper does not say. HeurFedAMP's eta has no place in its own equations: `ONCE` is the variant
    "modified to iterate once" as we read it, plain HeurFedAMP runs beside it.
    """
    personal = {"lr": personal_lr}
    attentive = {**personal, "own": 0.5, "lam": attentive_lam, "sigma": 50.0}
    return {
        "fedavg": {"lr": 0.02},
        "fedprox": {"lr": 0.02, "mu": 1e-4},
        "heurfedamp": attentive,
        ONCE: {**attentive, "outer_lr": 0.02},
        "perfedavg": {"lr": 0.02, "adapt_lr": personal_lr},
        "pfedme": {**personal, "outer_lr": 0.02, "lam": 15.0, "inner": 1},
        "fedmac": {**personal, "outer_lr": 3000.0, "lam": 1e-4},
    }


TABLE_2 = settings(personal_lr=0.05, attentive_lam=5.0)
TABLE_3 = settings(personal_lr=0.03, attentive_lam=1.0)

TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "heurfedamp": "HeurFedAMP",
    ONCE: "HeurFedAMP iterating once",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedmac": "FedMac",
}
DEVIATIONS = ("features are standardized by training rows only",)


@dataclass(frozen=True)
class Training:
    """One training: where, how long, how it is weighted and how often it is evaluated.

    `weighting` is "uniform" (1/S, the text of the paper) or "samples" (the code it builds on).
    With `train`, models are evaluated on training rows too.
    """

    row: str
    method: str
    options: Values
    rounds: int
    every: int
    weighting: str = "uniform"
    train: bool = False

    def algorithm(self) -> AnyAlgorithm:
        """Build the algorithm; HeurFedAMP mixes models without weights."""
        name = "heurfedamp" if self.method == ONCE else self.method
        weighted = {} if name == "heurfedamp" else {"weighting": self.weighting}
        return registry.get(name, **self.options, **weighted)


def job(label: str, training: Training, seed: int, context: Context) -> Job:
    """Return a job that trains one method in one federation and keeps its curves and its bytes."""
    if context.smoke:
        rounds = min(training.rounds, SMOKE_ROUNDS)
        training = replace(training, rounds=rounds, every=rounds)  # most of the time is evaluation
    return Job(label, seed, partial(_train, training, seed, context))


class RowMeans:
    """Records the mean over test rows beside the mean over clients, from the run directory."""

    reads_scores = True

    def __init__(self, run_dir: Path) -> None:
        self.file = run_dir / "clients.json"

    def __call__(self, event: RoundEnd) -> Mapping[str, float] | None:
        """Return the accuracy of both models, weighted by rows, where the round was evaluated."""
        if not event.record.scores:
            return None
        detail = json.loads(self.file.read_text())
        return {
            f"{model}_rows": float(
                np.average(
                    detail[model]["test"]["accuracy"], weights=detail[model]["test"]["samples"]
                )
            )
            for model in MODELS
            if model in detail
        }


def _train(training: Training, seed: int, context: Context, folder: Path | None) -> Values:
    federation = FEDERATIONS[training.row]
    try:
        data = federation.prepare(seed, context.data_dir)
    except MissingDataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    with TemporaryDirectory() as unnamed:
        run_dir = (Path(unnamed) if folder is None else folder) / "run"
        try:
            done = simulate(
                training.algorithm(),
                NeuralProblem(federation.module),
                data,
                training.rounds,
                seed=seed,
                participation=federation.cohort / federation.clients,
                evaluate_every=training.every,
                evaluation=Evaluation(
                    select="best-test", weighting="uniform", train=training.train
                ),
                callbacks=[RowMeans(run_dir)],
                run_dir=run_dir,
                resume=True,
            )
        except ClientError as error:  # every client diverged
            return {DIVERGED: str(error)}
        return values(done)


def values(run: Run) -> Values:
    """Return accuracies in percent (best and by round, both means), densities, losses, bytes."""
    head = run.summary()
    result: Values = {
        "rounds": head["rounds"],
        "bytes": head["bytes_up"] + head["bytes_down"],
        "dense": head["dense_up"] + head["dense_down"],
        "parameters": sum(leaf.numel() for leaf in run.personal(0).params.values()),
        "bytes_by_round": [r["bytes_up"] + r["bytes_down"] for r in run.metrics],
        "dense_by_round": [r["dense_up"] + r["dense_down"] for r in run.metrics],
        "density_by_round": [r["metrics"].get("density", 1.0) for r in run.metrics],
    }
    for model in MODELS:
        found = [r for r in run.metrics if model in r]
        if not found:
            continue
        by_client = [[r["round"], 100 * r[model]["test"]["accuracy"]["mean"]] for r in found]
        by_row = [[r["round"], 100 * r["metrics"][f"{model}_rows"]] for r in found]
        result |= {
            model: max(score for _, score in by_client),
            f"{model}_rows": max(score for _, score in by_row),
            f"{model}_curve": by_client,
            f"{model}_rows_curve": by_row,
        }
        if "train" in found[0][model]:
            result[f"{model}_loss_curve"] = [
                [r["round"], r[model]["train"]["loss"]["mean"]] for r in found
            ]
    return result


def paper_bits(density: float, parameters: int) -> float:
    """Return the bits that the paper counts for one client and round, both directions.

    Non-zeros take 64 bits, zeros one bit, and one index matrix says which is which.

    >>> round(paper_bits(0.5, 79510) / paper_bits(1.0, 79510), 3)
    0.516
    """
    if density >= 1:
        return 2.0 * 64 * parameters
    return (2 * 64 * density + 2 * (1 - density) + 1) * parameters


def paper_ratio(result: Values, after: int = 0) -> float:
    """Return the paper's bits after a round, as a part of what dense models would take."""
    count, densities = result["parameters"], result["density_by_round"][after:]
    spent = sum(paper_bits(density, count) for density in densities)
    return spent / (paper_bits(1.0, count) * len(densities))


def final(model: str, kind: str = "") -> Callable[[Values], float]:
    """Return what reads the score of a model in the last round, or of another `kind` of curve."""
    return lambda run: float(run[f"{model}{kind}_curve"][-1][1])


def column(
    grouped: Mapping[str, list[Values]],
    label: str,
    read: str | Callable[[Values], float],
    diverged: float = -math.inf,
) -> list[float]:
    """Return one value of every seed of a label; empty if it did not run.

    `diverged` stands for the value of a run that diverged, by default the worst score.
    """
    get = itemgetter(read) if isinstance(read, str) else read
    return [diverged if DIVERGED in run else float(get(run)) for run in grouped.get(label, ())]
