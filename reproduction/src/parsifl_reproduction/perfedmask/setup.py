"""What the recipes of PerFedMask's paper share: federations, methods, jobs and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ParsiflError
from parsifl.data import ClientData, prepare
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.recipe import SKIPPED, Context, Job, Values

PAPER = "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors"
TUNE_STEPS_PER_EPOCH = 9
MOMENTUM, DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Federation:
    """A data set, how it is divided, the network, and how long it is trained.

    Weak devices (the first of them, a share 1 - nu) run `weak` in place of `strong` under the
    methods that know no other way. Under the others they have a fraction `part` of the channels,
    or train a fraction `budget` of the parameters.
    """

    data: str
    clients: int
    partition: str
    model: str
    options: Values
    rounds: int
    lr: float
    batch_size: int
    part: float
    budget: float
    strong: Values
    weak: Values
    tune_steps: int
    validation: float
    evaluations: int

    def module(self, width: float = 1.0) -> nn.Module:
        """Build the network."""
        own = self.options.get("width", 1.0)
        return build(self.model, **{**self.options, "width": width * own})

    def prepare(self, seed: int, data_dir: str | None) -> ClientData:
        """Load and divide the data; they stay in memory for the next job."""
        return _prepared(self.data, self.clients, self.partition, self.validation, seed, data_dir)


@lru_cache(maxsize=1)
def _prepared(
    data: str, clients: int, partition: str, validation: float, seed: int, data_dir: str | None
) -> ClientData:
    return prepare(
        data, clients, partition, seed=seed, data_dir=data_dir, test=1 / 6, validation=validation
    )


_PAPER_SIZE: Values = {
    "clients": 100,
    "rounds": 80,
    "lr": 0.1,
    "batch_size": 50,
    "part": 1 / 8,
    "budget": 1 / 8,
    "strong": {"epochs": 4},
    "weak": {"epochs": 2},
    "tune_steps": 5 * TUNE_STEPS_PER_EPOCH,
    "validation": 1 / 12,
    "evaluations": 20,
}
FEDERATIONS: Mapping[str, Federation] = {
    "CIFAR-10": Federation(
        data="cifar-10:normalize=unit,augment=flip-crop",
        partition="pathological:classes=3,assign=dealt,sizes=equal",
        model="preresnet18",
        options={"classes": 10},
        **_PAPER_SIZE,
    ),
    "CIFAR-100": Federation(
        data="cifar-100:normalize=channel,augment=flip-crop",
        partition="pathological:classes=10,assign=dealt,sizes=equal",
        model="mobilenet",
        options={"classes": 100},
        **_PAPER_SIZE,
    ),
    "DomainNet": Federation(
        data="domainnet",
        partition="natural-id:split=5",
        model="alexnet",
        options={"classes": 10},
        **{**_PAPER_SIZE, "clients": 30, "rounds": 100, "lr": 0.01},
    ),
    "small": Federation(
        data="cifar-10:normalize=channel,augment=flip",
        clients=10,
        partition="pathological:classes=3,assign=dealt,sizes=equal",
        model="preresnet18",  # the paper's layers at an eighth of their width
        options={"classes": 10, "width": 1 / 8},
        rounds=16,
        lr=0.05,
        batch_size=25,
        part=1 / 4,
        budget=1 / 8,
        strong={"local_steps": 8},
        weak={"local_steps": 4},
        tune_steps=20,
        validation=0.0,
        evaluations=1,
    ),
}

TITLES = {
    "perfedmask": "PerFedMask",
    "fedbabu": "FedBABU",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "heterofl": "HeteroFL",
    "splitmix": "Split-Mix FL",
    "fedavg": "FedAvg",
    "perfedmask sequential": "PerFedMask, sequential masks",
    "perfedmask random": "PerFedMask, random masks",
    "perfedmask head": "PerFedMask with a trained head",
    "perfedmask+heterofl": "PerFedMask + HeteroFL",
    "perfedmask+splitmix": "PerFedMask + Split-Mix FL",
}
SEVEN = ("perfedmask", "fedbabu", "fedprox", "fednova", "heterofl", "splitmix", "fedavg")


@dataclass(frozen=True)
class Cell:
    """One run of a table: a federation, a method, and what the table varies."""

    federation: str
    method: str
    participation: float = 1.0
    nu: float = 0.5
    tune_epochs: int | None = None

    @property
    def label(self) -> str:
        """The name of the job."""
        text = f"{self.federation} {self.method} c={self.participation:g} nu={self.nu:g}"
        return text if self.tune_epochs is None else f"{text} tune={self.tune_epochs}"

    def at(self, context: Context) -> Cell:
        """Return the cell that stands for this one at the scale of the context."""
        if context.scale == "full":
            return self
        return replace(self, federation="small", participation=1.0)


def configured(name: str, federation: Federation) -> tuple[AnyAlgorithm, Values, Values]:
    """Return a method with the profiles of strong and of weak devices.

    Fine-tuning is left to the evaluation, where it is the same for all. The paper does not say
    the budgets of its combinations: there weak devices have narrow networks and train half of
    what they have. With HeteroFL every device is evaluated on the full model, as in the paper.
    """
    same: Values = {
        "lr": federation.lr,
        "batch_size": federation.batch_size,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "last_batch": "wrap",
        "milestones": (federation.rounds // 2, federation.rounds * 3 // 4),
    }
    part, strong = federation.part, federation.strong
    base, _, extra = name.partition("+")
    kind, _, design = base.partition(" ")
    if kind in ("fedavg", "fedprox", "fednova", "fedbabu"):
        own: dict[str, dict[str, Any]] = {"fedprox": {"mu": 0.1}, "fedbabu": {"tune_epochs": 0.0}}
        more = own.get(kind, {})
        return registry.get(kind, **same, **more), strong, federation.weak
    narrow = {**strong, "width": part}
    if kind == "heterofl":
        return registry.get(kind, **same, deploy="full"), strong, narrow
    if kind == "splitmix":
        return registry.get(kind, **same, bases=round(1 / part)), strong, narrow
    options: Values = {"tune_epochs": 0.0}
    if extra:
        options |= {"base": extra, "bases": round(1 / part), "deploy": "full"}
        return registry.get(kind, **same, **options), strong, {**narrow, "budget": 0.5}
    options |= {"head": "trained"} if design == "head" else {"design": design or "optimal"}
    return registry.get(kind, **same, **options), strong, {**strong, "budget": federation.budget}


def job(cell: Cell, seed: int, context: Context) -> Job:
    """Return a job that trains one method and keeps accuracies, sizes and curves."""
    return Job(cell.label, seed, partial(_run, cell, seed, context))


def _run(cell: Cell, seed: int, context: Context, folder: Path | None) -> Values:
    federation = FEDERATIONS[cell.federation]
    try:
        data = federation.prepare(seed, context.data_dir)
    except ParsiflError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    method, strong, weak = configured(cell.method, federation)
    count = round((1 - cell.nu) * len(data))
    steps = federation.tune_steps
    if cell.tune_epochs is not None:
        steps = cell.tune_epochs * steps // 5
    done = simulate(
        method,
        NeuralProblem(federation.module),
        replace(data, profiles=[weak] * count + [strong] * (len(data) - count)),
        federation.rounds,
        seed=seed,
        participation=cell.participation,
        evaluate_every=max(1, federation.rounds // federation.evaluations),
        evaluation=Evaluation(
            fine_tune_steps=steps,
            fine_tune_lr=None,
            fine_tune_batch_size=federation.batch_size,
            fine_tune_momentum=MOMENTUM,
            fine_tune_weight_decay=DECAY,
            select="best-validation" if federation.validation else "last",
            weighting="uniform",
        ),
        run_dir=None if folder is None else folder / "run",
        resume=folder is not None,
    )
    return values(done)


def values(run: Run) -> Values:
    """Return accuracies in percent before and after fine-tuning, costs a device, and curves."""
    head = run.summary()
    judged = [record for record in run.metrics if "global" in record]
    chosen = next(r for r in judged if r["round"] == head["global_round"])
    split = "validation" if "validation" in chosen["global"] else "test"
    devices = run.metrics[0]["devices"]
    clients = sum(row["clients"] for row in devices)
    costs = {
        name: sum(row["clients"] * row[name] for row in devices) / clients
        for name in ("forward", "backward", "trainable", "sent")
    }
    return {
        "before": 100 * chosen["global"]["test"]["accuracy"]["mean"],
        "after": 100 * chosen["personal"]["test"]["accuracy"]["mean"],
        "after_std": 100 * chosen["personal"]["test"]["accuracy"]["std"],
        "after_worst_decile": 100 * chosen["personal"]["test"]["accuracy"]["worst_decile"],
        "round": chosen["round"],
        "accuracy_curve": [
            [r["round"], 100 * r["global"][split]["accuracy"]["mean"]] for r in judged
        ],
        "loss_curve": [[r["round"], r["global"][split]["loss"]["mean"]] for r in judged],
        "bytes_up": head["bytes_up"],
        "bytes_down": head["bytes_down"],
        "seconds": head["seconds"],
        **costs,
    }


def plan(cells: Sequence[Cell], context: Context) -> list[Job]:
    """Return the jobs of all seeds; cells that are the same at this scale are run once."""
    wanted = dict.fromkeys(cell.at(context) for cell in cells)
    return [job(cell, seed, context) for seed in range(context.seeds) for cell in wanted]
