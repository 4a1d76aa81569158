"""What the recipes of FedSLR's paper share: its federations, settings and ways of counting."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from parsifl.algorithms.fedslr import FedSLR
from parsifl.core import registry, tree
from parsifl.core.errors import MissingDataError
from parsifl.data import ClientData, prepare
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.experiment import problem_for
from parsifl.engine.run import Run
from parsifl.engine.settings import Evaluation, NetworkModel
from parsifl.engine.simulate import simulate
from parsifl_reproduction.comparison import agreed
from parsifl_reproduction.fedslr.representations import visible
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Job, Values, spread

PAPER = "Fusion of Global and Local Knowledge for Personalized Federated Learning (FedSLR)"
EVALUATIONS = 20
FLOAT_BYTES = 4
HUGE = 10.0
"""A penalty that leaves nothing: the paper's way to switch a component off."""
WLAN = NetworkModel(latency=0.005, up=5e6, down=5e6)
"""A wireless network of 40 Mbit/s: the paper measures on one, without its speed."""


@dataclass(frozen=True)
class Federation:
    """A dataset, how it is divided (by label priors from Dir(0.1), or IID), and the network."""

    data: str
    skewed: str
    even: str
    model: str
    clients: int
    cohort: int
    rounds: int
    even_test: str = "shares"

    def prepare(self, split: str, seed: int, data_dir: str | None) -> ClientData:
        """Load and divide the data; test rows follow the label shares of the training rows."""
        skewed = split == "Non-IID"
        partition, test = (self.skewed, "shares") if skewed else (self.even, self.even_test)
        return _prepared(self.data, self.clients, partition, test, seed, data_dir)


@lru_cache(maxsize=2)
def _prepared(
    data: str, clients: int, partition: str, test: str, seed: int, data_dir: str | None
) -> ClientData:
    return prepare(data, clients, partition, seed=seed, data_dir=data_dir, test=test)


def _full(data: str, model: str) -> Federation:
    # refill as in the authors' code: priors are exact, some rows belong to several clients
    skewed = "inner-dirichlet:alpha=0.1,refill=true"
    return Federation(data, skewed, "iid", model, clients=100, cohort=10, rounds=1000)


FULL: Mapping[str, Federation] = {
    "CIFAR-10": _full("cifar-10", "resnet18"),
    "CIFAR-100": _full("cifar-100", "resnet18"),
    # with IID data, the authors' code has 500 instead of 100 test rows for each of 200 classes
    "Tiny ImageNet": replace(_full("tiny-imagenet", "resnet18_tiny"), even_test="shares:size=500"),
}
FASHION = Federation(
    "fashion-mnist",
    "inner-dirichlet:alpha=0.1,size=500,refill=true",
    # the prior of Dir(1000) is uniform but for noise: clients of the same size as in the other
    "inner-dirichlet:alpha=1000,size=500,refill=true",
    "mlp",
    clients=100,
    cohort=10,
    rounds=100,
)
SMOKE = replace(
    FASHION,
    skewed="inner-dirichlet:alpha=0.1,size=60,refill=true",
    even="inner-dirichlet:alpha=1000,size=60,refill=true",
    clients=6,
    cohort=3,
    rounds=2,
)

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
FEWER_ROUNDS: Mapping[str, Values] = {
    "fedslr": {"lam": 1e-3},
    "fedspa": {"horizon": 100},  # masks come to rest at the end, as in the paper
}
"""What differs at the faithful scale, which has a tenth of the paper's rounds."""
DEVIATIONS = (
    "Fashion-MNIST instead of CIFAR-10, CIFAR-100 and Tiny ImageNet",
    "an MLP 784-100-10 instead of ResNet18, without augmentation",
    "100 rounds instead of 1000, and lam = 1e-3 instead of 1e-4: the product lam * T is kept",
    "no algorithm is tuned: all have the paper's settings",
)


def federations(context: Context) -> Mapping[str, Federation]:
    """Return the federations of a scale."""
    if context.scale == "full":
        return FULL
    return {"Fashion-MNIST": SMOKE if context.smoke else FASHION}


def swept(context: Context) -> str:
    """Return the dataset of the sensitivity studies."""
    return "CIFAR-100" if context.scale == "full" else "Fashion-MNIST"


def deviations(context: Context, more: Sequence[str] = ()) -> list[str]:
    """Return where the protocol of a scale is not the paper's."""
    return [] if context.scale == "full" else [*DEVIATIONS, *more]


def settings(method: str, context: Context, **changes: Any) -> Values:
    """Return the settings of a method at a scale, with changes."""
    reduced = {} if context.scale == "full" else FEWER_ROUNDS.get(method, {})
    given = {**COMMON, **METHODS[method], **reduced, **changes}
    known = registry.find(method).__dataclass_fields__  # type: ignore[attr-defined]  # a dataclass
    return {name: value for name, value in given.items() if name in known}


@dataclass(frozen=True)
class Cell:
    """One training: where, which method, and the settings that differ from its usual ones."""

    row: str
    split: str
    method: str
    changes: tuple[tuple[str, float | str], ...] = ()
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name of the job, with every setting that differs from the usual ones."""
        changes = (f"{k}={v}" if isinstance(v, str) else f"{k}={v:g}" for k, v in self.changes)
        length = () if self.rounds is None else (f"rounds={self.rounds}",)
        return " ".join([self.row, self.split, self.method, *changes, *length])


def cell(
    row: str,
    split: str,
    method: str,
    context: Context,
    rounds: int | None = None,
    **changes: float | str,
) -> Cell:
    """Return a cell; what is no change at this scale is left out."""
    usual = settings(method, context)
    kept = {name: value for name, value in changes.items() if usual.get(name) != value}
    return Cell(row, split, method, tuple(kept.items()), rounds)


def plan(cells: Sequence[Cell], context: Context, first_seed: int = 0) -> list[Job]:
    """Return the jobs of all seeds; equal cells are trained once."""
    return [
        _job(each, seed, context)
        for seed in range(first_seed, first_seed + context.seeds)
        for each in dict.fromkeys(cells)
    ]


def _job(cell: Cell, seed: int, context: Context) -> Job:
    federation = federations(context)[cell.row]
    if cell.rounds is not None and not context.smoke:
        federation = replace(federation, rounds=cell.rounds)
    options = settings(cell.method, context, **dict(cell.changes))
    work = partial(train, federation, cell.split, cell.method, options, seed, context)
    return Job(cell.label, seed, work)


def train(
    federation: Federation,
    split: str,
    method: str,
    options: Values,
    seed: int,
    context: Context,
    folder: Path | None,
) -> Values:
    """Train one method in one federation, and return its curves, sizes and bytes."""
    try:
        data = federation.prepare(split, seed, context.data_dir)
    except MissingDataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
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
            network=WLAN,
            run_dir=None if folder is None else folder / "run",
            resume=folder is not None,
        )
    return values(run, data)


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
        "network_seconds": [r["simulated_seconds"] for r in run.metrics],
        "seconds": run.profile(),
        "dense_bytes": head["dense_up"] + head["dense_down"],
        "paper_gigabytes": paper_gigabytes(run, dense),
        "clients": client_accuracies(run, data),
    }
    if isinstance(run.algorithm, FedSLR):
        found["parameters"] = global_parameters(run, run.algorithm)
        found["mixed_parameters"] = found["parameters"] + personal_parameters(run)
        found["figure4"] = visible(run, data)
        last = run.records[-1]
        found["upload_parameters"] = last.parameters_up / last.trained
    for model in ("global", "personal"):
        if head[model] is not None:
            found[model] = 100 * head[model]["mean"]
            found[f"{model}_curve"] = [
                [r["round"], 100 * r[model]["test"]["accuracy"]["mean"]]
                for r in run.metrics
                if model in r
            ]
    return found


def global_parameters(run: Run, algorithm: FedSLR) -> int:
    """Return the numbers of the final global model: its factors, or its non-zeros if sparse."""
    if algorithm.global_penalty == "sparse":
        return sum(int(leaf.count_nonzero()) for leaf in tree.leaves(run.server.params))
    return sum(leaf.numel() for leaf in tree.leaves(run.server.params))


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

    Methods that do not record the size of their factors are counted by their dense messages.
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
    """Evaluate, seed by seed, whether values fall from each step to the next."""
    if not all(steps.values()):
        return Claim(statement, paper, "", "not run", "no data, or not part of this scale")
    falls = [
        all(later < earlier for earlier, later in pairwise(seed))
        for seed in zip(*steps.values(), strict=False)
    ]
    ours = "; ".join(f"{name}: {spread(found)}" for name, found in steps.items())
    return Claim(statement, paper, ours, agreed(falls), f"on {sum(falls)} of {len(falls)} seeds")
