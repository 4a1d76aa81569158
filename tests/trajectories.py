"""Golden trajectories of every algorithm: five small clients in float64, three rounds.

`python -m tests.trajectories [NAME ...]` writes the files of all algorithms, or of those named,
from runs with the loop executor. Tests compare every executor and in-process Flower with them at
1e-12. Low-rank leaves are stored dense, because the signs of singular vectors are arbitrary.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parsifl.core import config, registry, tree
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.core.leaves import densify
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.testing.conformance.examples import example_for
from parsifl.testing.conformance.harness import small

FOLDER = Path(__file__).parent / "golden" / "trajectories"
ROUNDS, SEED, PARTICIPATION = 3, 5, 0.7


@cache
def method_of(name: str) -> AnyAlgorithm:
    return small(registry.find(name))


@cache
def data_of(name: str) -> ClientData:
    """Return the conformance suite's example, with devices of several widths and budgets."""
    data = example_for(method_of(name)).data
    widths, budgets = (1.0, 0.5, 1.0, 0.25, 1.0), (1.0, 0.5, 0.75, 0.5, 1.0)
    profiles = [
        {**own, "width": width, "budget": budget}
        for own, width, budget in zip(data.profiles, widths, budgets, strict=True)
    ]
    if name == "fedbestsubset":  # its sums after a perfect fit would be rounding errors
        draw = Key(0, purpose="trajectories/noise").numpy_generator()
        noise = torch.from_numpy(draw.standard_normal(tuple(data.y.shape)))
        data = replace(data, y=data.y + 0.1 * noise)
    return replace(data, profiles=profiles)


def experiment_of(name: str) -> Experiment:
    linear = data_of(name).classes is None
    return Experiment(
        name,
        config.to_json(method_of(name)),
        data="digits",  # not read: tests hand over `data_of`
        model="glm" if linear else "mlp:hidden=8+5",
        rounds=ROUNDS,
        seed=SEED,
        participation=PARTICIPATION,
    )


def problem_of(name: str) -> Problem:
    return problem_for(experiment_of(name).model, data_of(name))


def run(name: str, engine: Any = "loop") -> Run:
    return simulate(
        method_of(name),
        problem_of(name),
        data_of(name),
        ROUNDS,
        seed=SEED,
        participation=PARTICIPATION,
        executor=engine,
    )


def leaves(value: Any) -> list[Tensor]:
    return [leaf.to(torch.float64) for leaf in tree.leaves(densify(value))]


def trajectory(done: Run) -> dict[str, Any]:
    """Return the end of a run as flat lists of numbers."""
    clients = range(len(done.pool.clients))
    return {
        "server": [_numbers(leaf) for leaf in leaves(done.server)],
        "clients": {
            str(i): [_numbers(leaf) for leaf in leaves(state)] for i, state in done.pool.store
        },
        "personal": {
            str(i): [_numbers(leaf) for leaf in leaves(done.personal(i).params)] for i in clients
        },
        "bytes_up": [record["bytes_up"] for record in done.metrics],
        "bytes_down": [record["bytes_down"] for record in done.metrics],
        "flops": [record["flops"] for record in done.metrics],
    }


def _numbers(leaf: Tensor) -> list[float]:
    return [float(f"{value:.15g}") for value in leaf.flatten().tolist()]


def stored(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return read


def gap(ours: Any, golden: list[list[float]]) -> float:
    """Return the largest difference between leaves, relative to the size of the leaf."""
    found = leaves(ours)
    assert [leaf.numel() for leaf in found] == [len(leaf) for leaf in golden]
    worst = 0.0
    for leaf, wanted in zip(found, golden, strict=True):
        other = torch.tensor(wanted, dtype=torch.float64)
        if other.numel():
            scale = other.abs().max().clamp(min=1.0)
            worst = max(worst, float((leaf.flatten() - other).abs().max() / scale))
    return worst


def main(names: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or list(registry.algorithms()):
        text = json.dumps(trajectory(run(name)), separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
