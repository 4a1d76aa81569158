"""Every layer that the fused path knows, against autograd in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.solvers.test_fused import SOLVERS, Solver, two_ways
from torch import Tensor, nn

import parsifl
from parsifl.data.clients import ClientData
from parsifl.nn import models
from parsifl.nn.dropout import KeyedDropout
from parsifl.nn.neural import NeuralProblem
from parsifl.testing.conformance.harness import difference

SIZES = (6, 11, 9)
SHAPE = (2, 6, 6)
WORDS = 7


class Words(nn.Module):
    """An embedding of three words each, and a layer on every word."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4, padding_idx=0)
        self.inner = nn.Linear(4, 3)
        self.norm = nn.LayerNorm((3, 3))
        self.outer = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        value: Tensor = self.outer(self.norm(torch.tanh(self.inner(self.table(x)))).flatten(1))
        return value


class Functions(nn.Module):
    """Pooling by functions, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=2, dilation=2)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = nn.functional.relu(self.conv(x), inplace=True)
        x = nn.functional.max_pool2d(nn.functional.avg_pool2d(x, 2, 1), 3, stride=2, padding=1)
        value: Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return value


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(0, 1), bias=False),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GroupNorm(4, 4, affine=False),
        nn.LayerNorm((4, 4), elementwise_affine=True),
        nn.AvgPool2d(2, padding=1),
        nn.Flatten(),
        nn.LayerNorm(36, bias=False),
        nn.Linear(36, 3),
    )


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        KeyedDropout(0.5, salt=1, channels=True),
        nn.Tanh(),
        nn.Flatten(),
        KeyedDropout(0.3, salt=2),
        nn.Linear(48, 3),
        KeyedDropout(0.0, salt=3),
    )


def tiny() -> nn.Module:
    """Pictures so small that they are unfolded."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 2, stride=3, padding=1, dilation=2),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def wide() -> nn.Module:
    """More classes than the softmax of few classes is for."""
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 20))


def cut_off() -> nn.Module:
    """An activation is the last layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 3), nn.ReLU())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": small_cnn,
    "wide": wide,
    "cut off": cut_off,
    "tiny": tiny,
    "normed": normed,
    "dropout": dropped,
    "functions": Functions,
    "words": Words,
}


def data_for(name: str, target: tuple[int, ...] | None = None) -> ClientData:
    draw = np.random.default_rng(5)
    count = sum(SIZES)
    x: Any = draw.normal(size=(count, *SHAPE))
    if name == "words":
        x = draw.integers(0, WORDS, size=(count, 3))
    y: Any = draw.integers(0, 3, size=count)
    if target is not None:
        y = draw.normal(size=(count, *target))
    ends = np.cumsum(SIZES)
    train = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    empty = [np.arange(0)] * len(SIZES)
    classes = 3 if target is None else None
    profiles: list[dict[str, Any]] = [{}] * len(SIZES)
    return ClientData(
        torch.from_numpy(x), torch.from_numpy(y), train, empty, empty, profiles, classes=classes
    )


@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_layers_agree_with_autograd(name: str, solve: Solver) -> None:
    problem = NeuralProblem(MODELS[name], dtype=torch.float64)
    assert problem.layer_chain is not None
    assert two_ways(problem, data_for(name), solve) < 1e-9


@pytest.mark.parametrize("target", [(), (1,), (3,)])
def test_squared_errors_agree_with_autograd(target: tuple[int, ...]) -> None:
    outputs = target[0] if target else 1
    problem = NeuralProblem(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.Tanh(), nn.Linear(4, outputs)),
        "mse",
        dtype=torch.float64,
    )
    for solve in SOLVERS:
        assert two_ways(problem, data_for("cnn", target), solve) < 1e-9


def test_the_vgg_is_a_chain() -> None:
    chain = NeuralProblem(lambda: models.build("vgg")).layer_chain
    assert chain is not None
    assert len(chain.layers) == 17


def test_a_model_of_words_is_trained_by_the_simulator() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, WORDS, size=(12, 3)) for _ in range(3)]
    own = [(x, np.minimum(x[:, 0], 2)) for x in rows]
    data = ClientData.of(own, dtype=torch.int64)
    problem = NeuralProblem(Words, dtype=torch.float64)
    method = parsifl.get("fedavg", batch_size=4, local_steps=3)
    fused = parsifl.simulate(method, problem, data, 2, executor="fused")
    alone = parsifl.simulate(method, problem, data, 2, executor="loop")
    assert data.x.dtype == torch.int64
    assert fused.metrics[0]["executor"] == "fused"
    assert not fused.metrics[0].get("fallbacks")
    assert difference(fused.model.params, alone.model.params) < 1e-12
