from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parsifl.core.batching import Batch
from parsifl.core.keys import Key
from parsifl.nn import models
from parsifl.nn.models.width import add_scalers
from parsifl.nn.neural import NeuralProblem


def batch(x: torch.Tensor, y: torch.Tensor) -> Batch:
    ones = torch.ones(len(y), dtype=x.dtype)
    return Batch(x, y, ones, torch.tensor(True), Key(0).tensor())


def test_hidden_outputs_are_divided_in_training_only() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    scaled = copy.deepcopy(net)
    add_scalers(scaled, 0.25)
    x = torch.randn(5, 3)
    torch.testing.assert_close(scaled(x), net[1](net[0](x) / 0.25))
    torch.testing.assert_close(scaled.eval()(x), net(x))


def test_a_narrow_problem_scales_its_loss_and_never_its_predictions() -> None:
    problem = NeuralProblem(
        lambda width=1.0: models.build("mlp", inputs=4, hidden=(8,), width=width)
    )
    plain, scaled = problem.narrow(0.5, scaled=False), problem.narrow(0.5)
    params = plain.init(Key(0))
    x, y = torch.randn(6, 4), torch.arange(6)
    half = {n: v * (2.0 if n.startswith("body") else 1.0) for n, v in params.items()}
    rows = batch(x, y)
    torch.testing.assert_close(scaled.loss(params, rows), plain.loss(half, rows))
    torch.testing.assert_close(scaled.predict(params, x), plain.predict(params, x))
    assert plain.layer_chain is not None
    assert scaled.layer_chain is None  # the fused solver does not know the scaler


def test_full_width_has_no_scaler() -> None:
    problem = NeuralProblem(lambda width=1.0: models.build("mlp", inputs=4, width=width))
    assert not any(layer._forward_hooks for layer in problem.module.modules())


@pytest.mark.parametrize("name", ["preresnet18", "mobilenet"])
def test_batch_norm_undoes_the_scaler(name: str) -> None:
    """With batch statistics the scaler is the identity but for the norm's epsilon."""
    factory = lambda width=1.0: models.build(name, classes=3, width=width)  # noqa: E731
    problem = NeuralProblem(factory, dtype=torch.float64)
    params = problem.narrow(0.125).init(Key(0))
    rows = batch(torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.arange(8) % 3)
    with_scaler = problem.narrow(0.125).loss(params, rows)
    without = problem.narrow(0.125, scaled=False).loss(params, rows)
    torch.testing.assert_close(with_scaler, without, rtol=0.1, atol=0.0)
