"""Tables 2 and 8: PerFedMask combined with HeteroFL and Split-Mix, with what devices compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import Batches, ClientRoundData
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.engine.costs import Cost, FlopCounter
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.comparison import compare
from parsifl_reproduction.perfedmask import deviations
from parsifl_reproduction.perfedmask.claims import (
    Grouped,
    after,
    before,
    column,
    number,
    untrained,
    verdict,
)
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


_LEADS = (
    ("perfedmask+heterofl", "heterofl", "after"),
    ("perfedmask+splitmix", "splitmix", "after"),
    *(
        ("perfedmask", other, when)
        for other in _METHODS
        if other != "perfedmask"
        for when in ("before", "after")
    ),
)
"""Who is above whom, before or after fine-tuning, by the text on Table 2."""
_IN_TABLE_1 = {("perfedmask", other, "after") for other in ("heterofl", "splitmix")}
_MEASURES = {"before": before, "after": after}
_SAVINGS = (
    ("perfedmask", "fedbabu"),
    *((f"perfedmask+{base}", base) for base in ("heterofl", "splitmix")),
    *((f"perfedmask+{base}", "perfedmask") for base in ("heterofl", "splitmix")),
)
"""Who trains fewer parameters, with fewer backward operations, than whom."""
_NOTE = "counted by formula for one step; the paper reads a processor's counters"
_NO_BUDGETS = "not comparable: the paper does not give the budgets of its combinations"


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


PARAMETERS = {
    "CIFAR-10": {
        "perfedmask": 6.138, "fedbabu": 11.167, "fedprox": 11.172, "fednova": 11.172,
        "heterofl": 5.674, "splitmix": 0.793, "fedavg": 11.172,
    },
    "CIFAR-100": {
        "perfedmask": 1.803, "fedbabu": 3.207, "fedprox": 3.309, "fednova": 3.309,
        "heterofl": 1.774, "splitmix": 0.223, "fedavg": 3.309,
    },
    "DomainNet": {
        "perfedmask": 31.221, "fedbabu": 57.022, "fedprox": 57.063, "fednova": 57.063,
        "heterofl": 28.983, "splitmix": 4.058, "fedavg": 57.063,
    },
}  # fmt: skip
"""Trainable parameters of Tables 1 and 7, in millions."""


def step_costs(
    method: AnyAlgorithm,
    problem: NeuralProblem,
    profiles: Sequence[Values],
    image: tuple[int, ...] = (3, 32, 32),
) -> Values:
    """Count one local step of 50 images: the first (weak) and last (strong) device, and means.

    The other devices are like one of these two: weak devices share one mask in the closed form.
    """
    infos = [ClientInfo(i, 50, profile) for i, profile in enumerate(profiles)]
    server = method.init_server(problem, infos, Key(0))
    counter = FlopCounter(method, problem)
    weak, strong = (
        _step_cost(counter, method, problem, server, info, image) for info in (infos[0], infos[-1])
    )
    return {
        "forward": (weak.forward + strong.forward) / 2,
        "backward": (weak.backward + strong.backward) / 2,
        "trainable": ((weak.trainable or 0) + (strong.trainable or 0)) / 2,
        "weak_backward": weak.backward,
        "strong_backward": strong.backward,
        "weak_trainable": weak.trainable or 0,
        "strong_trainable": strong.trainable or 0,
    }


def _step_cost(
    counter: FlopCounter,
    method: AnyAlgorithm,
    problem: NeuralProblem,
    server: object,
    info: ClientInfo,
    image: tuple[int, ...],
) -> Cost:
    down = method.broadcast(problem, server, info, Key(0))
    state = method.init_client(problem, info, down, Key(0))
    images = Batches(
        x=torch.empty(1, *image, device="meta"),
        y=torch.zeros(1, dtype=torch.int64, device="meta"),
        index=torch.zeros((1, 50), dtype=torch.int64, device="meta"),
        weight=torch.ones((1, 50), device="meta"),
        active=torch.ones(1, dtype=torch.bool, device="meta"),
        key=Key(0).tensor(),
        fixed=True,
    )
    cost = counter.count(down, state, ClientRoundData({"train": images}, None, Key(0).tensor(), 0))
    if cost is None:
        raise CapabilityError(f"the work of {type(method).__name__} cannot be counted")
    return cost


def _costs(data: str, name: str, _folder: Path | None) -> Values:
    here = FEDERATIONS[data]
    method, strong, weak = configured(name, here)
    half = here.clients // 2
    problem = NeuralProblem(here.module)
    return step_costs(method, problem, [weak] * half + [strong] * half, here.image)


def cost_job(data: str, name: str) -> Job:
    """Return a job that counts the work of a method on the meta device, at the paper's size."""
    return Job(_cost_label(data, name), 0, partial(_costs, data, name))


def _cost_label(data: str, method: str) -> str:
    return f"{data} {method} cost"


def cost(grouped: Grouped, data: str, method: str, key: str) -> float | None:
    """Return a number of a cost job; None if it did not run."""
    found = grouped.get(_cost_label(data, method))
    return None if not found else float(found[0][key])


def trainable(grouped: Grouped, data: str, method: str, published: float) -> Claim:
    """Compare the trainable parameters per device with the paper's, in millions."""
    found = cost(grouped, data, method, "trainable")
    return number(
        f"{data}, {TITLES[method]}: trainable parameters per device, in millions",
        published,
        None if found is None else found / 1e6,
    )


def _cells(data: str, context: Context) -> list[Cell]:
    name = data if context.scale == "full" else "MLP"
    return [Cell(name, method) for method in _METHODS]


def _plan(data: str, context: Context) -> list[Job]:
    return [*(cost_job(data, name) for name in _METHODS), *plan(_cells(data, context), context)]


def _conclude(data: str, context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    claims = _numbers(grouped, data)
    # at the faithful scale Table 8 reads the runs of Table 2
    counted = "perfedmask-table2" if data == "CIFAR-100" and context.scale != "full" else ""
    rows = dict(zip(_METHODS, TABLES[data], strict=True))
    cells = {cell.method: cell for cell in _cells(data, context)}
    for first, second, when in _LEADS:
        left, right = (column(grouped, cells[name], _MEASURES[when]) for name in (first, second))
        place = cells[first].federation
        # before fine-tuning a device's model guesses among all classes: no chance level is set
        chance = FEDERATIONS[place].chance if when == "after" else 0.0
        found = compare(
            f"{place}: {TITLES[first]} is above {TITLES[second]} {when} fine-tuning",
            f"{getattr(rows[first], when):g} against {getattr(rows[second], when):g}",
            left,
            right,
            untrained=untrained(chance, {TITLES[first]: left, TITLES[second]: right}),
        )
        again = "perfedmask-table1" if (first, second, when) in _IN_TABLE_1 else counted
        claims.append(replace(found, counted=again))
    return claims


def _numbers(grouped: Grouped, data: str) -> list[Claim]:
    """Compare parameters and operations with the paper's."""
    claims = []
    for method, row in zip(_METHODS, TABLES[data], strict=True):
        found = [trainable(grouped, data, method, row.trainable)]
        if method != "fedbabu":
            found.append(_relative(grouped, data, method, row, "backward"))
        if "+" in method and all(claim.ours for claim in found):
            found = [replace(claim, verdict="none", note=_NO_BUDGETS) for claim in found]
        if method != "fedbabu":
            found.append(_relative(grouped, data, method, row, "forward"))
        claims += found
    claims += [_saves(grouped, data, first, second) for first, second in _SAVINGS]
    return [*claims, _dominates(grouped, data)]


def _relative(grouped: Grouped, data: str, method: str, row: Row, way: str) -> Claim:
    """Compare the operations of a pass with those of FedBABU."""
    spent, whole = (cost(grouped, data, name, way) for name in (method, "fedbabu"))
    return number(
        f"{data}, {TITLES[method]}: {way} operations, relative to FedBABU",
        getattr(row, way) / getattr(TABLES[data][-1], way),
        None if spent is None or whole is None else spent / whole,
        note=_NOTE,
    )


def _dominates(grouped: Grouped, data: str) -> Claim:
    """Say whether the backward pass takes more operations than the forward pass."""
    statement = f"{data}: the backward pass of every method takes more operations than the forward"
    paper = "6.2: in general, backpropagation dominates"
    ratios = []
    for method in _METHODS:
        forth, back = (cost(grouped, data, method, way) for way in ("forward", "backward"))
        if forth is None or back is None:
            return Claim(statement, paper, "", "not run")
        ratios.append(back / forth)
    ours = f"{min(ratios):.2f} to {max(ratios):.2f} times as many"
    return Claim(statement, paper, ours, verdict(min(ratios) > 1))


def _saves(grouped: Grouped, data: str, combined: str, base: str) -> Claim:
    """Say whether a method needs fewer parameters and backward operations than another."""
    pairs = [
        (cost(grouped, data, combined, key), cost(grouped, data, base, key))
        for key in ("trainable", "backward")
    ]
    statement = (
        f"{data}: {TITLES[combined]} trains fewer parameters, with fewer backward operations, than "
        f"{TITLES[base]}"
    )
    rows = dict(zip(_METHODS, TABLES[data], strict=True))
    paper = (
        f"{rows[combined].trainable:g} against {rows[base].trainable:g} M, "
        f"{rows[combined].backward:g} against {rows[base].backward:g} MFLOP"
    )
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < len(pairs):
        return Claim(statement, paper, "", "not run")
    (few, many), (less, more) = known
    ours = (
        f"{few / 1e6:.3f} against {many / 1e6:.3f} M, "
        f"{less / 1e9:.2f} against {more / 1e9:.2f} GFLOP"
    )
    return Claim(statement, paper, ours, verdict(all(a < b for a, b in known)))


RECIPES = tuple(
    Recipe(
        f"perfedmask-{name}",
        f"PerFedMask combined with HeteroFL and Split-Mix on {data}",
        PAPER,
        partial(_plan, data),
        partial(_conclude, data),
        deviations.of(
            "MLP",
            more=(
                "parameters and operations are those of the paper's own networks",
                "weak devices of a combination train half of their narrow network: the paper gives "
                "no budgets",
                *more,
            ),
        ),
    )
    for name, data, more in (
        ("table2", "CIFAR-10", ()),
        ("table8", "CIFAR-100", (deviations.NO_CIFAR_100,)),
    )
)
