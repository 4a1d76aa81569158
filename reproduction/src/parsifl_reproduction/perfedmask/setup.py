"""What the recipes of PerFedMask's paper share: federations, methods and jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from parsifl.algorithms.perfedmask import PerFedMask
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import MissingDataError
from parsifl.core.keys import Key
from parsifl.data import ClientData
from parsifl.engine.simulate import simulate
from parsifl.masks import heuristics
from parsifl.masks.instance import instance_of
from parsifl.masks.plan import plan_of
from parsifl.nn.models import AlexNet, MobileNet, PreResNet18
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.perfedmask import datasets
from parsifl_reproduction.perfedmask.evaluation import (
    DECAY,
    MOMENTUM,
    PROTOCOL,
    BestServer,
    collected,
)
from parsifl_reproduction.perfedmask.networks import SmallCnn, SmallMlp
from parsifl_reproduction.recipe import SKIPPED, Context, Job, Values

PAPER = "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors"
TUNED = 5
"""Epochs of fine-tuning."""


@dataclass(frozen=True)
class Federation:
    """A dataset, how it is divided, the network, and how long it is trained.

    Attributes
    ----------
    source
        Returns the data of this many devices for a seed, from a directory with datasets.
    strong, weak
        Local epochs. Under algorithms that know no other way, weak devices run fewer.
    part, budget
        Otherwise weak devices have a fraction `part` of the channels, or train a fraction
        `budget` of the parameters.
    tuned
        Epochs of fine-tuning after which models are evaluated.
    chance
        The accuracy in percent of a guess among the classes of a device.
    steps
        Local steps in place of all epochs, for the scale "smoke".
    image
        The shape of a row for which operations are counted.
    """

    source: Callable[[int, int, str | None], ClientData]
    clients: int
    network: Callable[..., nn.Module]
    rounds: int
    lr: float
    strong: int = 4
    weak: int = 2
    batch_size: int = 50
    part: float = 1 / 8
    budget: float = 1 / 8
    tuned: tuple[int, ...] = (0, TUNED)
    chance: float = 100 / 3
    steps: int | None = None
    image: tuple[int, ...] = (3, 32, 32)

    def module(self, width: float = 1.0) -> nn.Module:
        """Build the network."""
        return self.network(width=width)

    def prepare(self, seed: int, data_dir: str | None) -> ClientData:
        """Load and divide the data; they stay in memory for the next job."""
        return self.source(self.clients, seed, data_dir)

    def length(self, epochs: int) -> Values:
        """Return the entry of a device's profile that says how long it trains."""
        return {"epochs": epochs} if self.steps is None else {"local_steps": self.steps}


_PAPER_CIFAR = Federation(
    source=partial(
        datasets.official, "cifar-10:normalize=unit,augment=flip-crop", datasets.THREE_CLASSES
    ),
    clients=100,
    network=PreResNet18,
    rounds=80,
    lr=0.1,
    tuned=(0, 2, 4, 5, 6, 8, 10),
)
_MLP = Federation(
    source=datasets.small_components,
    clients=20,
    network=SmallMlp,
    rounds=20,
    lr=0.03,
    part=1 / 4,
    tuned=(0, 2, 4, 5, 6, 8, 10),
)
_CNN = Federation(
    source=datasets.small_images,
    clients=10,
    network=SmallCnn,
    rounds=20,
    lr=0.1,
    part=1 / 4,
    tuned=(0, 2, 5, 10),
)
FEDERATIONS: Mapping[str, Federation] = {
    "CIFAR-10": _PAPER_CIFAR,
    "CIFAR-100": replace(
        _PAPER_CIFAR,
        source=partial(
            datasets.official,
            "cifar-100:normalize=channel,augment=flip-crop",
            "pathological:classes=10,assign=dealt,sizes=equal",
        ),
        network=partial(MobileNet, classes=100),
        chance=10.0,
    ),
    "DomainNet": replace(
        _PAPER_CIFAR,
        source=partial(
            datasets.official,
            "domainnet:size=256,normalize=unit,augment=flip-rotate",
            "natural-id:split=5",
        ),
        clients=30,
        network=AlexNet,
        rounds=100,
        lr=0.01,
        chance=10.0,
        image=(3, 256, 256),
    ),
    "MLP": _MLP,
    "MLP, 40 devices": replace(_MLP, clients=40, rounds=80, tuned=(0, TUNED)),
    "CNN": _CNN,
    "CNN, 40 devices": replace(_CNN, clients=40, rounds=40, lr=0.03, tuned=(0, TUNED)),
    "looks": replace(
        _MLP, source=datasets.looks, clients=30, lr=0.01, chance=10.0, tuned=(0, TUNED)
    ),
}
_SMOKE: Mapping[str, Federation] = {
    name: replace(federation, clients=4, rounds=2, strong=1, weak=1, batch_size=150, steps=2)
    for name, federation in FEDERATIONS.items()
}


def federation(name: str, context: Context) -> Federation:
    """Return a federation at the scale of a context."""
    return (_SMOKE if context.smoke else FEDERATIONS)[name]


TITLES = {
    "perfedmask": "PerFedMask",
    "fedbabu": "FedBABU",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "heterofl": "HeteroFL",
    "splitmix": "Split-Mix FL",
    "fedavg": "FedAvg",
    "perfedmask bias": "PerFedMask, masks of least bias",
    "perfedmask V": "PerFedMask, masks of least V",
    "perfedmask sequential": "PerFedMask, sequential masks",
    "perfedmask random": "PerFedMask, random masks",
    "perfedmask head": "PerFedMask with a trained head",
    "perfedmask+heterofl": "PerFedMask + HeteroFL",
    "perfedmask+splitmix": "PerFedMask + Split-Mix FL",
}
SEVEN = ("perfedmask", "fedbabu", "fedprox", "fednova", "heterofl", "splitmix", "fedavg")


@dataclass(frozen=True)
class Cell:
    """One run of a table: a federation, a method, and what the table varies.

    `psi` is the share of the parameters that weak devices may train, and `draw` the number of the
    random design.
    """

    federation: str
    method: str
    participation: float = 1.0
    nu: float = 0.5
    psi: float = 1 / 8
    draw: int = 0

    @property
    def label(self) -> str:
        """The name of the job."""
        text = f"{self.federation} {self.method} c={self.participation:g} nu={self.nu:g}"
        text += f" psi={self.psi:g}" if self.psi != 1 / 8 else ""
        return f"{text} draw={self.draw}" if self.draw else text


def configured(
    name: str, here: Federation, psi: float = 1 / 8
) -> tuple[AnyAlgorithm, Values, Values]:
    """Return a method with the profiles of strong and of weak devices.

    Fine-tuning is left to the evaluation, where it is the same for all. The paper does not say
    the budgets of its combinations: there weak devices have narrow networks and train half of
    what they have. With HeteroFL every device is evaluated on the full model, as in the paper.
    """
    same: Values = {
        "lr": here.lr,
        "batch_size": here.batch_size,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "last_batch": "wrap",
        "milestones": (here.rounds // 2, here.rounds * 3 // 4),
        "weighting": "uniform",
    }
    part, strong = here.part, here.length(here.strong)
    base, _, extra = name.partition("+")
    kind, _, design = base.partition(" ")
    if kind in ("fedavg", "fedprox", "fednova", "fedbabu"):
        own: dict[str, dict[str, Any]] = {"fedprox": {"mu": 0.1}, "fedbabu": {"tune_epochs": 0.0}}
        return registry.get(kind, **same, **own.get(kind, {})), strong, here.length(here.weak)
    narrow = {**strong, "width": part}
    if kind == "heterofl":
        return registry.get(kind, **same, deploy="full"), strong, narrow
    if kind == "splitmix":
        return registry.get(kind, **same, bases=round(1 / part)), strong, narrow
    options: Values = {"tune_epochs": 0.0}
    if extra:
        options |= {"base": extra, "bases": round(1 / part), "deploy": "full"}
        return registry.get(kind, **same, **options), strong, {**narrow, "budget": 0.5}
    if design in ("bias", "V"):
        options["objective"] = design
    elif design in ("sequential", "random"):
        options["design"] = design
    elif design == "head":
        options["head"] = "trained"
    return registry.get(kind, **same, **options), strong, {**strong, "budget": psi}


def job(cell: Cell, seed: int, context: Context) -> Job:
    """Return a job that trains one method and keeps accuracies, sizes and curves."""
    here = federation(cell.federation, context)
    return Job(cell.label, seed, partial(_run, cell, here, seed, context))


def plan(cells: Sequence[Cell], context: Context) -> list[Job]:
    """Return the jobs of all seeds, each cell once."""
    wanted = dict.fromkeys(cells)
    return [job(cell, seed, context) for seed in range(context.seeds) for cell in wanted]


def _run(cell: Cell, here: Federation, seed: int, context: Context, folder: Path | None) -> Values:
    try:
        data = here.prepare(seed, context.data_dir)
    except MissingDataError as error:
        return {SKIPPED: str(error).splitlines()[0]}
    problem = NeuralProblem(here.module)
    method, strong, weak = configured(cell.method, here, cell.psi)
    count = round((1 - cell.nu) * len(data))
    profiles = [weak] * count + [strong] * (len(data) - count)
    if isinstance(method, PerFedMask) and method.design == "random":
        key = Key(seed, purpose=f"masks/draw {cell.draw}")
        method = replace(method, plan=_drawn(problem, cell.psi, count, len(data), key))
        profiles = [strong] * len(data)  # a plan takes the place of budgets
    data = replace(data, profiles=profiles)
    best = BestServer(folder)
    run = simulate(
        method,
        problem,
        data,
        here.rounds,
        seed=seed,
        participation=cell.participation,
        # the training loss is read where every device takes part (Figure 4, Table 5)
        evaluation=replace(PROTOCOL, train=cell.participation == 1.0),
        callbacks=[best],
        run_dir=None if folder is None else folder / "run",
        resume=folder is not None,
    )
    # Table 3 varies the fine-tuning of two methods; the others are fine-tuned as in Table 1
    epochs = here.tuned if cell.method in ("perfedmask", "fedbabu") else (0, TUNED)
    return collected(run, best, data, epochs, here.batch_size)


def _drawn(
    problem: NeuralProblem, psi: float, weak: int, devices: int, key: Key
) -> tuple[tuple[str, ...], ...]:
    """Return a random design: for each device the names of the layers that it trains."""
    total = sum(group.size for group in problem.layer_groups)
    budgets = [psi * total] * weak + [float(total)] * (devices - weak)
    instance = instance_of(problem.layer_groups, budgets)
    return plan_of(instance, heuristics.random(instance, key), "J", method="random").named()
