"""Small problems with data for testing any algorithm, selected by its requirements."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.core.problem import HasBuffers, Problem, buffer_names
from parsifl.data.clients import ClientData
from parsifl.nn.neural import NeuralProblem

SIZES = (9, 12, 16, 16, 23)  # unequal, so that batches are partial and steps differ
FEATURES = 6
CLASSES = 3


@dataclass(frozen=True, eq=False)
class Example:
    """A problem with clients that fit it."""

    problem: Problem
    data: ClientData


Maker = Callable[[torch.dtype], Example | None]
"""Creates an example in a dtype; returns None if a dependency is not installed."""


def neural(dtype: torch.dtype) -> Example:
    """Return a small classifier of three layers, in several widths, on clustered labels."""
    problem = NeuralProblem(_network, dtype=dtype)
    teacher = _generator("teacher").normal(size=(FEATURES, CLASSES))
    return Example(problem, _clients(lambda x: (x @ teacher).argmax(axis=1), dtype))


def sparse_regression(dtype: torch.dtype) -> Example | None:
    """Return least squares with two relevant features of six."""
    try:
        module = importlib.import_module("parsifl.linear.glm")
    except ModuleNotFoundError:
        return None
    truth = np.zeros(FEATURES)
    truth[[1, 4]] = 1.0, -2.0
    problem: Any = module.GLM(FEATURES, "squared", dtype=dtype)
    return Example(problem, _clients(lambda x: x @ truth, dtype))


_MAKERS: list[Maker] = [neural, sparse_regression]


def register(maker: Maker) -> None:
    """Add an example with further capabilities; the last one added is tried first."""
    _MAKERS.insert(0, maker)


def example_for(algorithm: AnyAlgorithm, dtype: torch.dtype = torch.float64) -> Example:
    """Return the first example whose problem has all capabilities that the algorithm requires."""
    for maker in _MAKERS:
        example = maker(dtype)
        if example is not None and all(isinstance(example.problem, c) for c in algorithm.requires):
            return example
    needed = ", ".join(capability.__name__ for capability in algorithm.requires)
    raise CapabilityError(
        f"no example problem is {needed}, which {type(algorithm).__name__} requires; pass problem= "
        "and data=, or add one with parsifl.testing.conformance.register"
    )


def restricted(problem: Problem, capabilities: Iterable[type[Any]]) -> Problem:
    """Return the same problem with only the members of these protocols.

    Buffers stay: they are part of the parameters, and no model with them works without.
    """
    members = {"local_buffers"} if buffer_names(problem) else set()
    buffered = (HasBuffers,) if buffer_names(problem) else ()
    protocols: tuple[type[Any], ...] = (Problem, *buffered, *capabilities)
    for protocol in protocols:
        members |= {
            name
            for base in protocol.__mro__
            if getattr(base, "_is_protocol", False)
            for name in vars(base)
            if not name.startswith("_")
        }
    present = [name for name in sorted(members) if hasattr(problem, name)]
    # protocols look up members on the class, so they become properties that forward the call
    body = {
        name: property(lambda _, name=name: getattr(problem, name))  # type: ignore[misc]  # name= binds the loop variable
        for name in present
    }
    made: Problem = type("RestrictedProblem", (), body)()
    return made


def _network(width: float = 1.0) -> nn.Module:
    first, second = math.ceil(8 * width), math.ceil(5 * width)
    return nn.Sequential(
        nn.Linear(FEATURES, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, CLASSES),
    )


def _clients(target: Callable[[Any], Any], dtype: torch.dtype) -> ClientData:
    number = torch.empty(0, dtype=dtype).numpy().dtype
    clients = []
    for client, size in enumerate(SIZES):
        generator = _generator(f"client {client}")
        x = generator.normal(size=(size, FEATURES)) + 0.5 * generator.normal(size=FEATURES)
        y = target(x)
        clients.append((x.astype(number), y if y.dtype.kind == "i" else y.astype(number)))
    profiles: list[dict[str, Any]] = [{} for _ in SIZES]
    profiles[1] = {"local_steps": 1}  # a slow device: its neighbours in a batch take more steps
    return ClientData.of(clients, test=0.25, validation=0.15, profiles=profiles)


def _generator(purpose: str) -> np.random.Generator:
    return Key(0, purpose=f"conformance/{purpose}").numpy_generator()
