from __future__ import annotations

import pytest
import torch
from torch import nn

from parsifl.core.errors import ConfigError
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.constraint import Sparsity
from parsifl.nn.neural import NeuralProblem

NEURAL = NeuralProblem(lambda: nn.Linear(2, 2))
PARAMS = {"weight": torch.tensor([[1.0, -4.0], [3.0, 0.5]]), "bias": torch.tensor([2.0, 0.1])}


def test_one_budget_for_all_layers() -> None:
    found = Sparsity(tau=3).project(NEURAL, PARAMS)
    assert found["weight"].tolist() == [[0.0, -4.0], [3.0, 0.0]]
    assert found["bias"].tolist() == [2.0, 0.0]


def test_a_budget_for_each_layer_or_row() -> None:
    layer = Sparsity(tau=1, scope="layer").project(NEURAL, PARAMS)
    assert layer["weight"].tolist() == [[0.0, -4.0], [0.0, 0.0]]
    assert layer["bias"].tolist() == [2.0, 0.0]
    row = Sparsity(tau=1, scope="row").project(NEURAL, PARAMS)
    assert row["weight"].tolist() == [[0.0, -4.0], [3.0, 0.0]]


def test_density_counts_fractions_and_vectors_may_be_spared() -> None:
    found = Sparsity(density=0.5, scope="layer", spare_vectors=True).project(NEURAL, PARAMS)
    assert found["weight"].tolist() == [[0.0, -4.0], [3.0, 0.0]]
    assert torch.equal(found["bias"], PARAMS["bias"])


def test_what_a_problem_always_keeps_comes_on_top() -> None:
    problem = GLM(4, intercept=True, keep=(0,))
    coef = torch.tensor([0.25, 5.0, -6.0, 1.0, 0.5]).double()
    found = Sparsity(tau=1).project(problem, {"coef": coef})["coef"]
    assert found.tolist() == [0.25, 0.0, -6.0, 0.0, 0.5]
    softmax = GLM(3, "softmax", classes=2, intercept=True)
    matrix = torch.tensor([[3.0, 2.0, 0.0, 0.5], [1.0, 4.0, 2.0, 0.75]]).double()
    rows = Sparsity(tau=1, scope="row").project(softmax, {"coef": matrix})["coef"]
    assert rows.tolist() == [[3.0, 0.0, 0.0, 0.5], [0.0, 4.0, 0.0, 0.75]]
    both = Sparsity(tau=2).project(softmax, {"coef": matrix})["coef"]
    assert both.tolist() == [[3.0, 0.0, 0.0, 0.5], [0.0, 4.0, 0.0, 0.75]]


def test_tau_beyond_the_dimension_keeps_everything() -> None:
    assert Sparsity(tau=100).project(NEURAL, PARAMS).keys() == PARAMS.keys()
    assert torch.equal(Sparsity(tau=100).project(NEURAL, PARAMS)["weight"], PARAMS["weight"])


def test_groups_need_one_row_to_live_in() -> None:
    with pytest.raises(ConfigError, match="need scope="):
        Sparsity(tau=1, groups=2).project(NEURAL, PARAMS)
    coef = torch.tensor([1.0, 1.0, 1.3, 0.0]).double()
    found = Sparsity(tau=1, groups=2).project(GLM(4), {"coef": coef})["coef"]
    assert found.tolist() == [1.0, 1.0, 0.0, 0.0]
