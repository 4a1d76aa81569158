"""What the recipes of FedSLR's paper share: its federations, settings and ways of counting."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from parsifl.algorithms.fedslr import FedSLR
from parsifl.core import registry, tree
from parsifl.core.errors import DataError
from parsifl.data import ClientData, prepare
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.experiment import problem_for
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl_reproduction.fedslr import pictures
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Job, Values, spread

PAPER = "Fusion of Global and Local Knowledge for Personalized Federated Learning (FedSLR)"
EVALUATIONS = 10
FLOAT_BYTES = 4
HUGE = 10.0
"""A penalty that leaves nothing: the paper's way to switch a component off."""


@dataclass(frozen=True)
class Federation:
    """A data set, how it is divided (by label priors from Dir(0.1), or IID), and the network."""

    data: str
    skewed: str
    even: str
    model: str
    clients: int
    cohort: int
    rounds: int
    splits: tuple[str, ...] = ("Non-IID", "IID")

    def prepare(self, split: str, seed: int, data_dir: str | None) -> ClientData:
        """Load and divide the data; test rows follow the label shares of the training rows."""
        partition = self.skewed if split == "Non-IID" else self.even
        return _prepared(self.data, self.clients, partition, seed, data_dir)


@lru_cache(maxsize=2)
def _prepared(
    data: str, clients: int, partition: str, seed: int, data_dir: str | None
) -> ClientData:
    return prepare(data, clients, partition, seed=seed, data_dir=data_dir, test="shares")


def _full(data: str, model: str) -> Federation:
    # refill as in the authors' code: priors are exact, some rows belong to several clients
    skewed = "inner-dirichlet:alpha=0.1,refill=true"
    return Federation(data, skewed, "iid", model, clients=100, cohort=10, rounds=1000)


FULL: Mapping[str, Federation] = {
    "CIFAR-10": _full("cifar-10", "resnet18"),
    "CIFAR-100": _full("cifar-100", "resnet18"),
    "Tiny ImageNet": _full("tiny-imagenet", "resnet18_tiny"),
}
SMALL: Mapping[str, Federation] = {
    "Fashion-MNIST": Federation(
        "fashion-mnist",
        "inner-dirichlet:alpha=0.1,size=25",
        # the prior of Dir(1000) is uniform but for noise: clients of the same size as in the other
        "inner-dirichlet:alpha=1000,size=25",
        "mlp",
        clients=300,
        cohort=30,
        rounds=100,
    )
}
EXPORTED = "ResNet18"
APART: Mapping[str, Federation] = {
    # Table 9 at small scale: the paper's network, trained for as long as two cores allow
    EXPORTED: Federation(
        "fashion-mnist",
        "inner-dirichlet:alpha=0.1,size=60",
        "inner-dirichlet:alpha=1000,size=60",
        "resnet18",
        clients=4,
        cohort=2,
        rounds=8,
    )
}

COMMON: Values = {
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 1e-3,
    "batch_size": 20,
    "epochs": 2.0,
}
METHODS: Mapping[str, Values] = {
    "scaffold": {},
    "feddyn": {"alpha": 0.1},
    "fedavg": {"weighting": "uniform"},
    "fedslr": {"eta_g": 10.0, "lam": 1e-4, "mu": 1e-3, "personal_epochs": 1.0},
    "perfedavg": {"lr": 0.001, "adapt_lr": 0.01},
    "lgfedavg": {"weighting": "uniform"},
    "fedrep": {"weighting": "uniform"},
    "ditto": {"lam": 0.1, "personal_epochs": 1.0, "weighting": "uniform"},
    "apfl": {"alpha": 0.5, "weighting": "uniform"},
    "local": {},
    "fedspa": {"density": 0.5},
}
"""The paper's settings; Per-FedAvg's two rates are its own."""
SHRUNK: Values = {"batch_size": 4, "lr": 0.03}
"""Small scale: clients have 25 rows, not 500; a smaller batch wants a smaller rate."""
ON_A_PERCEPTRON: Mapping[str, Values] = {
    "fedslr": {"lam": 1e-3},  # bites on two layers
    "perfedavg": {"adapt_lr": 0.03},
    "fedspa": {"lr": 0.1, "horizon": 100},  # masks come to rest at the end, as in the paper
    "fedavg": {"lr": 0.1},
    "ditto": {"lr": 0.1},
    "lgfedavg": {"lr": 0.01},
}
"""Small scale: what differs from the paper's settings. Every method has the best of three rates;
`fedslr_trials` tells how they were chosen, and the federation too."""
ON_RESNET: Values = {"epochs": 1.0, "batch_size": 20, "lr": 0.1}
"""Table 9 at small scale: three steps a phase."""


def federations(context: Context) -> Mapping[str, Federation]:
    """Return the data sets of a scale."""
    return FULL if context.scale == "full" else SMALL


def swept(context: Context) -> str:
    """Return the data set of the sensitivity studies."""
    return "CIFAR-100" if context.scale == "full" else "Fashion-MNIST"


def settings(method: str, context: Context, **changes: Any) -> Values:
    """Return the settings of a method at a scale, with changes."""
    small = {**SHRUNK, **ON_A_PERCEPTRON.get(method, {})} if context.scale != "full" else {}
    given = {**COMMON, **METHODS[method], **small, **changes}
    if given.get("lam") == HUGE:  # from zero, no gradient would reach a hidden layer
        given["p_init"] = "copy"
    return known_settings(method, given)


def known_settings(method: str, given: Values) -> Values:
    """Return those settings that a method has."""
    known = registry.find(method).__dataclass_fields__  # type: ignore[attr-defined]  # a dataclass
    return {name: value for name, value in given.items() if name in known}


@dataclass(frozen=True)
class Cell:
    """One training: where, which method, and the settings that differ from its usual ones."""

    row: str
    split: str
    method: str
    changes: tuple[tuple[str, float], ...] = ()

    @property
    def label(self) -> str:
        """The name of the job; recipes that train the same may share a folder, and train once."""
        changes = (f"{name}={value:g}" for name, value in self.changes)
        return " ".join([self.row, self.split, self.method, *changes])


def cell(row: str, split: str, method: str, context: Context, **changes: float) -> Cell:
    """Return a cell; what is no change at this scale is left out."""
    usual = settings(method, context)
    kept = {name: value for name, value in changes.items() if usual[name] != value}
    return Cell(row, split, method, tuple(kept.items()))


def plan(cells: Sequence[Cell], context: Context) -> list[Job]:
    """Return the jobs of all seeds; cells that are the same are trained once."""
    return [
        Job(each.label, seed, partial(_work, each, seed, context))
        for seed in range(context.seeds)
        for each in dict.fromkeys(cells)
    ]


def _work(cell: Cell, seed: int, context: Context, folder: Path | None) -> Values:
    """Train one method and keep its curves, sizes and bytes."""
    try:
        run, data = train(cell, seed, context, folder)
    except DataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    found = values(run, data)
    if cell == Cell(swept(context), "Non-IID", "fedslr"):
        found |= {"figure4": pictures.visible(run, data)}
    return found


def train(
    cell: Cell, seed: int, context: Context, folder: Path | None = None
) -> tuple[Run, ClientData]:
    """Run one method in one federation of the scale."""
    federation = {**federations(context), **APART}[cell.row]
    options = settings(cell.method, context, **dict(cell.changes))
    return simulated(federation, cell.split, cell.method, options, seed, context.data_dir, folder)


def simulated(
    federation: Federation,
    split: str,
    method: str,
    options: Values,
    seed: int,
    data_dir: str | None,
    folder: Path | None,
) -> tuple[Run, ClientData]:
    """Run one method in one federation."""
    data = federation.prepare(split, seed, data_dir)
    with warnings.catch_warnings():
        if options.get("lam") == HUGE:  # nothing shall be left
            warnings.filterwarnings("ignore", message="FedSLR's penalty")
        # Table 5 varies eta_g on purpose
        warnings.filterwarnings("ignore", message="lr \\* steps / eta_g")
        run = simulate(
            registry.get(method, **options),
            problem_for(federation.model, data),
            data,
            federation.rounds,
            seed=seed,
            participation=federation.cohort / federation.clients,
            evaluate_every=max(federation.rounds // EVALUATIONS, 1),
            evaluation=Evaluation(weighting="uniform"),
            run_dir=None if folder is None else folder / "run",
            resume=folder is not None,
        )
    return run, data


def values(run: Run, data: ClientData) -> Values:
    """Return accuracies in percent, parameters, bytes on the wire, and the paper's count."""
    head = run.summary()
    dense = sum(leaf.numel() for leaf in run.personal(0).params.values())
    found: Values = {
        "dense_parameters": dense,
        "bytes_down": head["bytes_down"],
        "bytes_up": head["bytes_up"],
        "down_by_round": [r["bytes_down"] for r in run.metrics],
        "up_by_round": [r["bytes_up"] for r in run.metrics],
        "dense_bytes": head["dense_up"] + head["dense_down"],
        "paper_gigabytes": paper_gigabytes(run, dense),
        "server_seconds": fmean(r["seconds"]["aggregate"] for r in run.metrics),
        "clients": client_accuracies(run, data),
    }
    if isinstance(run.algorithm, FedSLR):
        found["parameters"] = sum(leaf.numel() for leaf in tree.leaves(run.server.params))
        found["mixed_parameters"] = found["parameters"] + personal_parameters(run)
    for model in ("global", "personal"):
        if head[model] is not None:
            found[model] = 100 * head[model]["mean"]
            found[f"{model}_curve"] = [
                [r["round"], 100 * r[model]["test"]["accuracy"]["mean"]]
                for r in run.metrics
                if model in r
            ]
    return found


def personal_parameters(run: Run) -> float:
    """Return the mean number of non-zeros of the personal components of all clients.

    A client that never took part has none.
    """
    counts = [
        sum(int(leaf.count_nonzero()) for leaf in tree.leaves(state.personal))
        for _, state in run.pool.store
    ]
    return sum(counts) / len(run.pool.clients)


def client_accuracies(run: Run, data: ClientData) -> list[float]:
    """Return the accuracy in percent of every client's personal model on its own test rows."""
    from parsifl.engine.batch_sampler import BatchSampler

    shards = BatchSampler(data, run.problem)
    found = []
    for client, rows in enumerate(data.test):
        model = run.personal(client)
        correct = model.problem.metrics(model.params, shards.rows(rows))["accuracy"]
        found.append(100 * float(correct.mean()))
    return found


def gigabytes(down: float, up: float, exchanges: int) -> float:
    """Return Table 2's decimal gigabytes: four bytes for each parameter sent down and up.

    >>> round(gigabytes(11_173_952, 11_173_952, 10 * 1000), 2)
    893.92
    """
    return FLOAT_BYTES * (down + up) * exchanges / 1e9


def paper_gigabytes(run: Run, dense: int) -> float:
    """Return what Table 2 would count: factors down where shorter, a dense model up.

    Methods that do not tell the size of their factors are counted by their dense messages.
    """
    total = 0.0
    for record in run.metrics:
        numbers = record["metrics"].get("global_parameters")
        if numbers is None:
            total += (record["dense_down"] + record["dense_up"]) / 1e9
        else:
            total += gigabytes(numbers, dense, record["trained"])
    return total


def column(grouped: Mapping[str, list[Values]], label: str, key: str) -> list[float]:
    """Return one value of every seed of a label; empty if it did not run."""
    return [float(values[key]) for values in grouped.get(label, ()) if key in values]


def falling(statement: str, paper: str, steps: Mapping[str, Sequence[float]]) -> Claim:
    """Judge whether the means fall from one step to the next."""
    if not all(steps.values()):
        return Claim(statement, paper, "", "not run", "no data, or not part of this scale")
    means = [fmean(found) for found in steps.values()]
    held = all(later < earlier for earlier, later in pairwise(means))
    ours = "; ".join(f"{name}: {spread(found)}" for name, found in steps.items())
    return Claim(statement, paper, ours, "held" if held else "did not hold")
