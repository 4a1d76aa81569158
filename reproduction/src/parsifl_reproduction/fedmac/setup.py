"""What the recipes of FedMac's paper share: its federations, settings and cost formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from parsifl.core import registry
from parsifl.core.errors import DataError
from parsifl.data import ClientData, prepare
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Job, Values, spread

PAPER = "Sparse Personalized Federated Learning via Maximizing Correlation (FedMac)"
EVALUATE_EVERY = 10


@dataclass(frozen=True)
class Federation:
    """One row of Table 1: a data set, how it is divided, and the network.

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


def settings(personal_lr: float, attentive_lam: float) -> dict[str, Values]:
    """Return the settings that Tables 2 and 3 give each method; they differ in two numbers.

    Per-FedAvg's two rates are read as eta for the meta step and eta_p for the adaptation; the
    paper does not say. HeurFedAMP's eta has no place in its equations and is not used. Clients
    weigh by their samples in every method, as in the code that the paper builds on; its text has
    1/S for FedMac, but an equal mean of the unequal synthetic clients is far below its numbers.
    """
    weighed = {"lr": personal_lr, "weighting": "samples"}
    return {
        "fedavg": {"lr": 0.02},
        "fedprox": {"lr": 0.02, "mu": 1e-4},
        "heurfedamp": {"lr": personal_lr, "own": 0.5, "lam": attentive_lam, "sigma": 50.0},
        "perfedavg": {"lr": 0.02, "adapt_lr": personal_lr},
        "pfedme": {**weighed, "outer_lr": 0.02, "lam": 15.0, "inner": 1},
        "fedmac": {**weighed, "outer_lr": 3000.0, "lam": 1e-4},
    }


TABLE_2 = settings(personal_lr=0.05, attentive_lam=5.0)
TABLE_3 = settings(personal_lr=0.03, attentive_lam=1.0)

TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "heurfedamp": "HeurFedAMP",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedmac": "FedMac",
}


def job(
    label: str, row: str, method: str, options: Values, seed: int, rounds: int, context: Context
) -> Job:
    """Return a job that trains one method in one federation and keeps its curve and its bytes."""
    return Job(label, seed, partial(_train, row, method, options, seed, rounds, context))


def _train(
    row: str,
    method: str,
    options: Values,
    seed: int,
    rounds: int,
    context: Context,
    folder: Path | None,
) -> Values:
    federation = FEDERATIONS[row]
    try:
        data = federation.prepare(seed, context.data_dir)
    except DataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    done = simulate(
        registry.get(method, **options),
        NeuralProblem(federation.module),
        data,
        rounds,
        seed=seed,
        participation=federation.cohort / federation.clients,
        evaluate_every=EVALUATE_EVERY,
        evaluation=Evaluation(select="best-test"),
        run_dir=None if folder is None else folder / "run",
        resume=folder is not None,
    )
    return values(done)


def values(run: Run) -> Values:
    """Return accuracies in percent (best and by round), densities, and bytes."""
    head = run.summary()
    result: Values = {
        "rounds": head["rounds"],
        "seconds": head["seconds"],
        "bytes": head["bytes_up"] + head["bytes_down"],
        "dense": head["dense_up"] + head["dense_down"],
        "parameters": sum(leaf.numel() for leaf in run.personal(0).params.values()),
        "bytes_by_round": [r["bytes_up"] + r["bytes_down"] for r in run.metrics],
        "dense_by_round": [r["dense_up"] + r["dense_down"] for r in run.metrics],
        "density_by_round": [r["metrics"].get("density", 1.0) for r in run.metrics],
    }
    for model in ("global", "personal"):
        judged = [r for r in run.metrics if model in r]
        if head[model] is not None:
            result[model] = 100 * head[model]["mean"]
            result[f"{model}_best_round"] = head[f"{model}_round"]
            result[f"{model}_curve"] = [
                [r["round"], 100 * r[model]["test"]["accuracy"]["mean"]] for r in judged
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


def paper_ratio(result: Values) -> float:
    """Return the paper's bits over all rounds, as a part of what dense models would take."""
    count = result["parameters"]
    spent = sum(paper_bits(density, count) for density in result["density_by_round"])
    return spent / (paper_bits(1.0, count) * len(result["density_by_round"]))


def at_least(
    statement: str, paper: str, found: Sequence[float] | None, bound: float, note: str = ""
) -> Claim:
    """Judge whether the mean over seeds reaches a bound."""
    if not found:
        return Claim(statement, paper, "", "not run", note)
    return Claim(
        statement, paper, spread(found), "held" if fmean(found) >= bound else "did not hold", note
    )


def column(grouped: Mapping[str, list[Values]], label: str, key: str) -> list[Any] | None:
    """Return one value of every seed of a label; None if it did not run."""
    found = [values[key] for values in grouped.get(label, ()) if key in values]
    return found or None
