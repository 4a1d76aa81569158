from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import grad, vmap

import parsifl
from parsifl.core.metrics import Metric
from parsifl.nn.losses import row_loss
from parsifl.nn.metrics import top


def test_cross_entropy_is_the_same_under_vmap_and_outside() -> None:
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(3, 5, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (3, 5), generator=draw)
    expected = -output.log_softmax(-1).gather(2, y[..., None])[..., 0]
    alone = torch.stack([row_loss("cross-entropy", *pair) for pair in zip(output, y, strict=True)])
    batched = vmap(lambda o, t: row_loss("cross-entropy", o, t))(output, y)
    assert torch.allclose(alone, expected, rtol=0, atol=1e-15)
    assert torch.equal(batched, alone)


def test_its_slope_is_softmax_minus_the_label() -> None:
    output = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([[0, 1, 2, 3, 0], [3, 3, 1, 0, 2]])
    found = vmap(grad(lambda o, t: row_loss("cross-entropy", o, t).sum()))(output, y)
    assert torch.allclose(found, output.softmax(-1) - torch.eye(4, dtype=torch.float64)[y])


def clients() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(12, 4)), rng.integers(0, 3, 12)) for _ in range(3)]


def test_a_metric_of_the_user_is_recorded_beside_the_others() -> None:
    problem = parsifl.NeuralProblem(
        lambda: nn.Linear(4, 3),
        metrics=[top(3), Metric("margin", True, lambda out, y: out.gather(1, y[:, None])[:, 0])],
    )
    run = parsifl.simulate(parsifl.get("ditto", local_steps=2), problem, clients(), rounds=1)
    scores = run.records[-1].scores["personal"]["test"]
    assert set(scores) == {"accuracy", "loss", "top3", "margin"}
    assert scores["top3"]["mean"] == 1.0


def test_top_agrees_with_accuracy_at_one() -> None:
    generator = torch.Generator().manual_seed(3)
    output = torch.randn(50, 5, generator=generator)
    y = torch.randint(0, 5, (50,), generator=generator)
    assert torch.equal(top(1).rows(output, y), (output.argmax(1) == y).float())
    assert top(9).rows(output, y).min() == 1.0
