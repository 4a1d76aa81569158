"""The bits that docs/reference/reproducibility.md promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.engine import threads
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem

pytestmark = pytest.mark.bits


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 10))


def branching() -> nn.Module:
    """Return what is no chain, so that it runs under vmap."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(192, 192), nn.Linear(192, 10)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(x + self.wide(x).relu())

    return Skip()


def pictures() -> nn.Module:
    shape, first = nn.Unflatten(1, (3, 8, 8)), nn.Conv2d(3, 16, 3)
    return nn.Sequential(shape, first, nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))


@pytest.mark.parametrize(
    ("build", "executor"), [(perceptron, "fused"), (branching, "vmap"), (pictures, "threads")]
)
def test_a_run_has_the_same_bits_with_any_number_of_threads(
    build: Any, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than one block of clients: states, personal and global scores."""
    monkeypatch.setattr(threads, "cores", lambda: 4)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(12, 40, 192)).astype(np.float32)
    data = list(zip(x, generator.integers(0, 10, (12, 40)), strict=True))
    before, runs = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            runs.append(simulate(Ditto(lr=0.1, local_steps=5), NeuralProblem(build), data, 2))
        finally:
            torch.set_num_threads(before)
    one, three = runs
    assert one.metrics[-1]["executor"] == executor
    assert tree.same(one.server, three.server)
    assert all(
        tree.same(a, b) for (_, a), (_, b) in zip(one.pool.store, three.pool.store, strict=True)
    )
    for scope in ("global", "personal"):
        assert one.metrics[-1][scope] == three.metrics[-1][scope]


@pytest.mark.parametrize("clients", [3, 7])
@pytest.mark.parametrize("batch", [20, 32])
def test_one_block_of_perceptrons_has_the_same_bits_with_any_number_of_threads(
    clients: int, batch: int
) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(clients, 100, 192)).astype(np.float32)
    data = list(zip(x, generator.integers(0, 10, (clients, 100)), strict=True))
    method = FedAvg(lr=0.1, local_steps=3, batch_size=batch)
    before, servers = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        try:
            run = simulate(method, NeuralProblem(perceptron), data, 2, evaluate_every=0)
            servers.append(run.server)
        finally:
            torch.set_num_threads(before)
    assert all(tree.same(servers[0], other) for other in servers[1:])
