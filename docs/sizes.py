"""Message sizes of an algorithm on a reference model, measured in a small run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import nn

from parsifl import NeuralProblem, simulate
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.core.registry import find
from parsifl.linear.glm import GLM
from parsifl.nn import models

CLIENTS, ROWS, COLUMNS, HIDDEN, CLASSES = 4, 40, 784, 100, 10
ROUNDS = 3
NEURAL = f"an MLP {COLUMNS}-{HIDDEN}-{CLASSES}"
LINEAR = f"a linear model of {COLUMNS:,} columns"
_OF_GLMS = ("SupportSolvable", "Summable")


@dataclass(frozen=True)
class Sizes:
    """One client's messages in the last round: values, dense bytes, and bytes sent."""

    model: str
    parameters: int
    item: int
    down: tuple[int, int, int]
    up: tuple[int, int, int]


@cache
def sizes(name: str) -> Sizes:
    """Run an algorithm with default settings on random rows, and return its message sizes."""
    method = find(name)()
    model, problem, targets = _problem(method)
    start = problem.init(Key(0))
    parameters = sum(value.numel() for value in start.values())
    item = next(iter(start.values())).itemsize
    draw = np.random.default_rng(0)
    clients = [
        (draw.normal(size=(ROWS, COLUMNS)).astype(np.float32), targets(draw))
        for _ in range(CLIENTS)
    ]
    run = simulate(method, problem, clients, ROUNDS, evaluate_every=0)
    record = run.metrics[-1]
    sizes_by_way = {
        way: tuple(record[f"{what}_{way}"] // CLIENTS for what in ("parameters", "dense", "bytes"))
        for way in ("down", "up")
    }
    return Sizes(model, parameters, item, sizes_by_way["down"], sizes_by_way["up"])  # type: ignore[arg-type]  # three each


def _problem(method: AnyAlgorithm) -> tuple[str, Any, Any]:
    if any(capability.__name__ in _OF_GLMS for capability in method.requires):
        problem = GLM(COLUMNS, "squared-half")
        return LINEAR, problem, lambda draw: draw.normal(size=ROWS).astype(np.float32)

    def network(width: float = 1.0) -> nn.Module:
        return models.build("mlp", inputs=COLUMNS, hidden=(HIDDEN,), classes=CLASSES, width=width)

    neural = NeuralProblem(network)
    return NEURAL, neural, lambda draw: draw.integers(0, CLASSES, ROWS)
