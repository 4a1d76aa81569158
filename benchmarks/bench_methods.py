"""Algorithms and models with executor="auto", compared with the loop over clients.

No combination may reach less than 0.95 of the speed of the loop: if batching does not pay off,
`engine/executors.py` has to choose another executor. Every registered algorithm runs on the MLP and
on the regression; other linear models run those that solve them differently. The other models
train client by client in threads, with the same code as in the loop: one algorithm of each family
runs on the VGG, and two that differ in client state run on the rest. Overhead matters most for
small workloads, so models are narrow and clients have few rows and steps. The first round of a run
also counts operations; that time would dominate such short runs and is excluded. The bound is the
larger of the time of the products of local training and the time of reading its rows once per
round, without the evaluation at the end.

Arguments select models and algorithms, ``all`` means all registered algorithms:
``python benchmarks/bench_methods.py vgg resnet8 all``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse
from timing import (
    Bound,
    Row,
    chosen,
    interleaved,
    longer,
    marked,
    moved,
    products,
    progress,
    report,
    row,
)

import parsifl
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine.costs import FlopCounter
from parsifl.engine.run import Run
from parsifl.nn import models

ROWS, TURNS, LOWEST = 80, 3, 0.95
CLOSER = 3  # factor on the turns of candidates that seem slower than the loop
LEAST_BATCH = 20  # rows; some algorithms take all
FAMILIES = ("fedavg", "scaffold", "ditto", "fedmac", "fedslr", "fedspa", "heterofl", "perfedmask")
LINEAR = ("fedavg", "ditto", "fedht", "fedgradmp", "inexactfedgradmp")
FEW = ("fedavg", "ditto")


@dataclass(frozen=True)
class Subject:
    """A problem with matching data, the length of training, and the algorithms to run."""

    problem: Callable[[], Problem]
    shape: tuple[int, ...]
    clients: int
    rounds: int
    steps: int
    methods: tuple[str, ...]
    classes: int = 10
    zeros: float = 0.0
    """The fraction of zeros; above 0, rows are sparse."""


def perceptron() -> Problem:
    """Return 784-100-10."""
    return parsifl.NeuralProblem(lambda width=1.0: models.build("mlp", width=width))


def pictures(name: str, factor: float, side: int = 32, rounds: int = 1) -> Subject:
    """Return a convolutional network at a fraction of its width."""
    methods = FAMILIES if rounds > 1 else FEW

    def build(width: float = 1.0) -> torch.nn.Module:
        return models.build(name, classes=10, width=factor * width)

    return Subject(lambda: parsifl.NeuralProblem(build), (3, side, side), 4, rounds, 2, methods)


def linear(
    datafit: str, methods: tuple[str, ...], *, classes: int = 2, zeros: float = 0
) -> Subject:
    """Return a linear model of 100 features, or of 2000 if most of them are 0."""
    width = 2000 if zeros else 100
    several = {"classes": classes} if datafit == "softmax" else {}
    problem = partial(parsifl.GLM, width, datafit, **several)
    return Subject(problem, (width,), 10, 2, 10, methods, classes, zeros)


ALL = tuple(registry.algorithms())
SUBJECTS = {
    "perceptron": Subject(perceptron, (784,), 10, 2, 10, ALL),
    "regression": linear("squared", ALL),
    "sparse regression": linear("squared", FEW, zeros=0.95),
    "logistic": linear("logistic", LINEAR),
    "softmax": linear("softmax", LINEAR, classes=3),
    "vgg": pictures("vgg", 0.5, rounds=2),
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
    labels = generator.integers(0, subject.classes, size)
    y = labels if problem.higher_is_better else x.reshape(*size, -1)[..., 0]
    if subject.zeros:
        x *= generator.random(x.shape) >= subject.zeros
        return ClientData.of([(csr_matrix(rows), own) for rows, own in zip(x, y, strict=True)])
    return ClientData.of(list(zip(x, y, strict=True)))


def row_bytes(x: Any) -> float:
    """Return the bytes of a row, on average."""
    held = x.data.nbytes + x.indices.nbytes if issparse(x) else x.nbytes
    return float(held / x.shape[0])


def configured(name: str, steps: int) -> AnyAlgorithm:
    """Return an algorithm with this many steps, if it has that setting."""
    try:
        return registry.get(name, local_steps=steps)
    except ConfigError:
        return registry.get(name)


def trained(
    method: AnyAlgorithm, problem: Problem, data: ClientData, rounds: int, engine: Any
) -> Run:
    """Train a few rounds and evaluate at the end."""
    return parsifl.simulate(method, problem, data, rounds, executor=engine, evaluate_every=rounds)


def compare(title: str, run: Callable[[Any], Run], product: Bound, reading: Bound) -> Row:
    """Compare executor="auto" with the loop; `product` is the bound of one operation."""
    operations = sum(record["flops"] or 0 for record in run("auto").metrics)
    candidates = {"auto": lambda: run("auto"), "loop": lambda: run("loop")}
    with mock.patch.object(FlopCounter, "count", return_value=None):
        found = interleaved(candidates, TURNS)
        if found["auto"].median > found["loop"].median:
            found = interleaved(candidates, CLOSER * TURNS, warm=True)
    bound = longer(product.times(operations), reading)
    item = row(title, found["auto"], found["loop"].median, "loop", bound)
    progress(f"{title}: {item.ratio:.2f} times the loop")
    return marked(item, LOWEST)


def measure(label: str, subject: Subject) -> Iterator[Row]:
    """Compare every algorithm that supports the problem."""
    problem = subject.problem()
    data, product = data_for(subject, problem), products(1.0)
    rows = min(len(data.train[0]), LEAST_BATCH * subject.steps)
    reading = moved(subject.rounds * subject.clients * rows * row_bytes(data.x))
    for name in subject.methods:
        method = configured(name, subject.steps)
        if all(isinstance(problem, capability) for capability in method.requires):
            run = partial(trained, method, problem, data, subject.rounds)
            yield compare(f"{name}, {label}", run, product, reading)


def asked() -> dict[str, Subject]:
    """Return the selected models, each with the selected algorithms."""
    words = chosen(SUBJECTS, (*ALL, "all"))
    labels = [word for word in words if word in SUBJECTS] or list(SUBJECTS)
    named = ALL if "all" in words else tuple(word for word in words if word in ALL)
    return {
        label: replace(SUBJECTS[label], methods=named or SUBJECTS[label].methods)
        for label in labels
    }


if __name__ == "__main__":
    found = [item for label, subject in asked().items() for item in measure(label, subject)]
    raise SystemExit(report(found, __doc__))
