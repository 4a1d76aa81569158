from __future__ import annotations

import pytest
import torch
from torch import nn

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Layered, Problem
from parsifl.linear.glm import GLM
from parsifl.nn.ensemble import Ensemble, join, part
from parsifl.nn.neural import NeuralProblem

BASE = NeuralProblem(
    lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), dtype=torch.float64
)
X, Y = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 2


def test_it_is_a_problem_with_layers() -> None:
    both = Ensemble(BASE, (0, 2))
    assert isinstance(both, Problem)
    assert isinstance(both, Layered)
    assert [block.name for block in both.layer_groups] == ["0/0", "2/0"]
    assert both.head == ("0/2.weight", "0/2.bias", "2/2.weight", "2/2.bias")
    assert both.shapes().keys() == both.init(Key(0)).keys()
    assert (both.primary_metric, both.higher_is_better, both.supports_vmap) == (
        "accuracy",
        True,
        True,
    )
    assert both.uses_batch_statistics is False


def test_members_start_apart_and_the_first_as_the_base() -> None:
    params = Ensemble(BASE, (0, 1)).init(Key(5))
    first = BASE.init(Key(5))
    assert all(torch.equal(part(params, 0)[name], value) for name, value in first.items())
    assert not torch.equal(params["0/0.weight"], params["1/0.weight"])


def test_every_member_gets_the_gradient_of_its_own_loss() -> None:
    both = Ensemble(BASE, (0, 1))
    params = both.init(Key(0))
    rows = Batch(X, Y, torch.ones(7).double(), torch.tensor(True), Key(0).tensor())
    found = torch.func.grad(both.loss)(params, rows)
    for member in (0, 1):
        alone = torch.func.grad(BASE.loss)(part(params, member), rows)
        for name, value in alone.items():
            torch.testing.assert_close(found[f"{member}/{name}"], value)


def test_metrics_are_those_of_the_mean_output() -> None:
    both = Ensemble(BASE, (0, 1))
    params = both.init(Key(0))
    mean = (BASE.predict(part(params, 0), X) + BASE.predict(part(params, 1), X)) / 2
    metrics = both.metrics(params, Rows(X, Y, torch.ones(7)))
    torch.testing.assert_close(metrics["accuracy"], (mean.argmax(1) == Y).double())
    expected = nn.functional.cross_entropy(mean, Y, reduction="none")
    torch.testing.assert_close(metrics["loss"], expected)


def test_join_is_the_inverse_of_part() -> None:
    params = Ensemble(BASE, (0, 1)).init(Key(0))
    again = join({member: part(params, member) for member in (0, 1)})
    assert again.keys() == params.keys()


def test_what_it_cannot_do_is_told() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Ensemble(BASE, ())
    plain = Ensemble(GLM(3, "squared"), (0,))
    with pytest.raises(CapabilityError, match="layers"):
        _ = plain.head
    with pytest.raises(CapabilityError, match="shapes"):
        plain.shapes()
