"""Tables 2 and 8: PerFedMask combined with HeteroFL and Split-Mix, with what devices compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import Batches, ClientRoundData
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.engine.flops import Cost, FlopCounter
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.perfedmask.claims import Published, column, in_order, verdict
from parsifl_reproduction.perfedmask.setup import FEDERATIONS, PAPER, TITLES, Cell, configured, plan
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, by_label

_METHODS = (
    "perfedmask+splitmix",
    "perfedmask+heterofl",
    "perfedmask",
    "splitmix",
    "heterofl",
    "fedbabu",
)


_NOTE = (
    "counted by formula for one step; the paper reads a processor's counters, and does not say "
    "the budgets of its combinations"
)


@dataclass(frozen=True)
class Row:
    """A row of Table 2 or 8: accuracies, trainable parameters and operations in millions."""

    before: float
    after: float
    trainable: float
    forward: float
    backward: float


TABLES: dict[str, tuple[Row, ...]] = {
    "CIFAR-10": (
        Row(51.88, 87.74, 0.691, 178, 514),
        Row(69.44, 87.79, 5.473, 1111, 1721),
        Row(70.14, 88.43, 6.138, 2182, 2697),
        Row(57.96, 85.56, 0.793, 178, 541),
        Row(62.58, 87.33, 5.674, 1111, 1749),
        Row(69.27, 88.20, 11.167, 2182, 3466),
    ),
    "CIFAR-100": (
        Row(29.66, 70.78, 0.204, 17.182, 122),
        Row(30.94, 71.56, 1.611, 122, 464),
        Row(32.04, 72.40, 1.803, 220, 711),
        Row(23.09, 65.95, 0.223, 17.182, 127),
        Row(30.13, 68.65, 1.774, 122, 473),
        Row(29.70, 69.01, 3.207, 220, 863),
    ),
}


def step_costs(method: AnyAlgorithm, problem: NeuralProblem, profiles: Sequence[Values]) -> Values:
    """Count one local step of 50 pictures: the first (weak) and last (strong) device, and means.

    The other devices are like one of these two: weak devices share one mask in the closed form.
    """
    infos = [ClientInfo(i, 50, profile) for i, profile in enumerate(profiles)]
    server = method.init_server(problem, infos, Key(0))
    counter = FlopCounter(method, problem)
    weak, strong = (
        _step_cost(counter, method, problem, server, info) for info in (infos[0], infos[-1])
    )
    return {
        "forward": (weak.forward + strong.forward) / 2,
        "backward": (weak.backward + strong.backward) / 2,
        "trainable": ((weak.trainable or 0) + (strong.trainable or 0)) / 2,
        "weak_backward": weak.backward,
        "strong_backward": strong.backward,
    }


def _step_cost(
    counter: FlopCounter,
    method: AnyAlgorithm,
    problem: NeuralProblem,
    server: object,
    info: ClientInfo,
) -> Cost:
    down = method.broadcast(problem, server, info, Key(0))
    state = method.init_client(problem, info, down, Key(0))
    pictures = Batches(
        x=torch.empty(1, 3, 32, 32, device="meta"),
        y=torch.zeros(1, dtype=torch.int64, device="meta"),
        index=torch.zeros((1, 50), dtype=torch.int64, device="meta"),
        weight=torch.ones((1, 50), device="meta"),
        active=torch.ones(1, dtype=torch.bool, device="meta"),
        key=Key(0).tensor(),
        fixed=True,
    )
    cost = counter.count(
        down, state, ClientRoundData({"train": pictures}, None, Key(0).tensor(), 0)
    )
    if cost is None:
        raise CapabilityError(f"the work of {type(method).__name__} cannot be counted")
    return cost


def _cost_label(data: str, method: str) -> str:
    return f"{data} {method} cost"


def _costs(data: str, name: str, _folder: Path | None) -> Values:
    federation = FEDERATIONS[data]
    method, strong, weak = configured(name, federation)
    half = federation.clients // 2
    return step_costs(method, NeuralProblem(federation.module), [weak] * half + [strong] * half)


def _cost_job(data: str, name: str) -> Job:
    return Job(_cost_label(data, name), 0, partial(_costs, data, name))


def _published(data: str, key: str) -> Published:
    rows = zip(_METHODS, TABLES[data], strict=True)
    return {Cell(data, method): float(getattr(row, key)) for method, row in rows}


def _plan(data: str, context: Context) -> list[Job]:
    costs = [_cost_job(data, method) for method in _METHODS]
    return costs + plan(list(_published(data, "after")), context)


def _conclude(data: str, context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    claims = []
    for method, row in zip(_METHODS, TABLES[data], strict=True):
        who, label = f"{data}, {TITLES[method]}", _cost_label(data, method)
        found = column(grouped, label, "trainable")
        ours = None if found is None else found[0] / 1e6
        statement = f"{who}: trainable parameters a device, in millions"
        claims.append(_number(statement, row.trainable, ours, 0.01 * row.trainable))
        if method != "fedbabu":
            whole = column(grouped, _cost_label(data, "fedbabu"), "backward")
            spent = column(grouped, label, "backward")
            ratio = spent[0] / whole[0] if spent and whole else None
            statement = f"{who}: backward operations, as a part of FedBABU's"
            paper = row.backward / TABLES[data][-1].backward
            claims.append(_number(statement, paper, ratio, 0.02))
    for key in ("before", "after"):
        claims += in_order(context, results, _published(data, key), "perfedmask", key)
    return claims


def _number(statement: str, paper: float, ours: float | None, tolerance: float) -> Claim:
    if ours is None:
        return Claim(statement, f"{paper:.3f}", "", "not run")
    held = abs(ours - paper) <= tolerance
    return Claim(statement, f"{paper:.3f}", f"{ours:.3f}", verdict(held), _NOTE)


RECIPES = tuple(
    Recipe(
        f"perfedmask-{name}",
        f"PerFedMask combined with HeteroFL and Split-Mix on {data}",
        PAPER,
        partial(_plan, data),
        partial(_conclude, data),
    )
    for name, data in (("table2", "CIFAR-10"), ("table8", "CIFAR-100"))
)
