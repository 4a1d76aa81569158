"""Every registered method with the engine's own choice against the loop over clients.

Nothing may be slower than 0.95 of the loop: where batching does not pay, `engine/choice.py` has to
choose something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import Row, interleaved, report, row

import parsifl
from parsifl import models, registry
from parsifl.algorithm import AnyMethod
from parsifl.data.clients import ClientData
from parsifl.engine.evaluation import Evaluation
from parsifl.errors import ConfigError
from parsifl.problem import Problem

CLIENTS, ROWS, STEPS, TURNS = 10, 60, 5, 5


@dataclass(frozen=True)
class Subject:
    """A problem with data that fit it."""

    name: str
    problem: Problem
    data: ClientData


def subjects() -> tuple[Subject, ...]:
    """Return a perceptron, a small convolutional network and a regression."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, (CLIENTS, ROWS))

    def clients(shape: tuple[int, ...], y: Any) -> ClientData:
        x = generator.normal(size=(CLIENTS, ROWS, *shape)).astype(np.float32)
        return ClientData.of(list(zip(x, y, strict=True)))

    def perceptron(width: float = 1.0) -> torch.nn.Module:
        return models.build("mlp", inputs=784, width=width)

    def pictures(width: float = 1.0) -> torch.nn.Module:
        return models.build("vgg", width=0.5 * width)

    real = generator.normal(size=(CLIENTS, ROWS)).astype(np.float32)
    return (
        Subject("perceptron", parsifl.NeuralProblem(perceptron), clients((784,), labels)),
        Subject("small VGG", parsifl.NeuralProblem(pictures), clients((3, 32, 32), labels)),
        Subject("regression", parsifl.GLM(100, "squared"), clients((100,), real)),
    )


def configured(name: str) -> AnyMethod:
    """Return a method with short settings, where it takes them."""
    try:
        return registry.get(name, steps=STEPS)
    except ConfigError:
        return registry.get(name)


def trained(method: AnyMethod, subject: Subject, engine: Any) -> Callable[[], object]:
    """Return two rounds, judged once at the end."""
    run = partial(parsifl.simulate, method, subject.problem, subject.data, 2)
    return partial(run, engine=engine, evaluate_every=2, evaluation=Evaluation())


def measure(name: str, subject: Subject) -> Row | None:
    """Compare the engine's choice with the loop; None if the method cannot use the problem."""
    method = configured(name)
    if not all(isinstance(subject.problem, capability) for capability in method.requires):
        return None
    found = interleaved(
        {"auto": trained(method, subject, "auto"), "loop": trained(method, subject, "sequential")},
        TURNS,
    )
    mark = "loop" if found["loop"].median >= 0.95 * found["auto"].median else "loop  TOO SLOW"
    return row(f"{name}, {subject.name}", found["auto"], found["loop"].median, mark)


if __name__ == "__main__":
    rows = (measure(name, subject) for subject in subjects() for name in registry.algorithms())
    report([found for found in rows if found is not None])
