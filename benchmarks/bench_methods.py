"""Methods and models with the engine's own choice against the loop over clients.

Nothing may be slower than 0.95 of the loop: where batching does not pay, `engine/choice.py` has to
choose something else. On the perceptron and the regression every registered method runs. The other
models all train client by client in threads, where a method is the same code as in the loop: one of
each family runs on the VGG, and on the rest two that differ in how much a client keeps. The smaller
the work, the more the choice costs, so models are narrow, and clients have few rows and steps. The
bound is the longer of the products of local training and of reading its rows once a round, which
leaves out the evaluation at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import Bound, Row, chosen, interleaved, longer, moved, products, progress, report, row

import parsifl
from parsifl import models, registry
from parsifl.algorithm import AnyMethod
from parsifl.data.clients import ClientData
from parsifl.engine.run import Run
from parsifl.errors import ConfigError
from parsifl.problem import Problem

ROWS, ROUNDS, LOWEST = 80, 2, 0.95
LEAST_BATCH = 20  # rows; some methods take all
FAMILIES = ("fedavg", "scaffold", "ditto", "fedmac", "fedslr", "fedspa", "heterofl", "perfedmask")


@dataclass(frozen=True)
class Subject:
    """A problem with data that fit it, how long it is trained, and by which methods."""

    problem: Callable[[], Problem]
    shape: tuple[int, ...]
    clients: int
    steps: int
    methods: tuple[str, ...]
    turns: int


def perceptron() -> Problem:
    """Return 784-100-10."""
    return parsifl.NeuralProblem(lambda width=1.0: models.build("mlp", width=width))


def pictures(
    name: str, factor: float, side: int = 32, methods: tuple[str, ...] = ("fedavg", "ditto")
) -> Subject:
    """Return a convolutional network at a fraction of its width."""

    def build(width: float = 1.0) -> torch.nn.Module:
        return models.build(name, classes=10, width=factor * width)

    return Subject(lambda: parsifl.NeuralProblem(build), (3, side, side), 4, 2, methods, 3)


ALL = tuple(registry.algorithms())
SUBJECTS = {
    "perceptron": Subject(perceptron, (784,), 10, 10, ALL, 3),
    "regression": Subject(lambda: parsifl.GLM(100, "squared"), (100,), 10, 10, ALL, 3),
    "vgg": pictures("vgg", 0.5, methods=FAMILIES),
    "resnet8": pictures("resnet8", 1.0),
    "resnet18": pictures("resnet18", 0.25),
    "resnet18_tiny": pictures("resnet18_tiny", 0.25, 64),
    "preresnet18": pictures("preresnet18", 0.25),
    "mobilenet": pictures("mobilenet", 0.25),
    "alexnet": pictures("alexnet", 0.125, 224),
}


def data_for(subject: Subject, problem: Problem) -> ClientData:
    """Return random rows: only time is measured."""
    generator = np.random.default_rng(0)
    size = (subject.clients, ROWS)
    x = generator.normal(size=(*size, *subject.shape)).astype(np.float32)
    y = generator.integers(0, 10, size) if problem.maximize else x.reshape(*size, -1)[..., 0]
    return ClientData.of(list(zip(x, y, strict=True)))


def configured(name: str, steps: int) -> AnyMethod:
    """Return a method with so many steps, if it takes them."""
    try:
        return registry.get(name, steps=steps)
    except ConfigError:
        return registry.get(name)


def trained(method: AnyMethod, problem: Problem, data: ClientData, engine: Any) -> Run:
    """Train two rounds and judge at the end."""
    return parsifl.simulate(method, problem, data, ROUNDS, engine=engine, evaluate_every=ROUNDS)


def compare(
    title: str, run: Callable[[Any], Run], turns: int, product: Bound, reading: Bound
) -> Row:
    """Compare the engine's choice with the loop; `product` is the bound of one operation."""
    runs: list[Run] = []
    candidates = {"auto": lambda: runs.append(run("auto")), "loop": lambda: run("sequential")}
    found = interleaved(candidates, turns)
    ratio = found["loop"].median / found["auto"].median
    note = "" if ratio >= LOWEST else "TOO SLOW"
    progress(f"{title}: {ratio:.2f} times the loop {note}")
    operations = sum(record["flops"] or 0 for record in runs[-1].metrics)
    bound = longer(product.times(operations), reading)
    return row(title, found["auto"], found["loop"].median, "loop", bound, note)


def measure(label: str, subject: Subject) -> Iterator[Row]:
    """Compare every method that can use the problem."""
    problem = subject.problem()
    data, product = data_for(subject, problem), products(1.0)
    rows = min(len(data.train[0]), LEAST_BATCH * subject.steps)
    reading = moved(ROUNDS * subject.clients * rows * data.x[0].nbytes)
    for name in subject.methods:
        method = configured(name, subject.steps)
        if all(isinstance(problem, capability) for capability in method.requires):
            run = partial(trained, method, problem, data)
            yield compare(f"{name}, {label}", run, subject.turns, product, reading)


if __name__ == "__main__":
    report([item for label in chosen(SUBJECTS) for item in measure(label, SUBJECTS[label])])
