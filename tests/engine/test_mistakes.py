from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import parsifl
from parsifl.errors import CapabilityError, DataError
from parsifl.keys import Key
from parsifl.testing.toys import clients


class Noisy(nn.Module):
    """Drops units without a key."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize("engine", ["sequential", "batched", "auto"])
def test_randomness_inside_a_model_is_refused(engine: str) -> None:
    before = torch.get_rng_state()
    problem = parsifl.NeuralProblem(Noisy, dtype=torch.float64)
    with pytest.raises(CapabilityError, match="random numbers of its own"):
        parsifl.simulate(parsifl.get("fedavg"), problem, clients(), 1, engine=engine)  # type: ignore[arg-type]  # by parameter
    assert torch.equal(before, torch.get_rng_state())


def test_frozen_parameters_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    with pytest.raises(CapabilityError, match=r"0\.weight"):
        parsifl.NeuralProblem(module)


def test_labels_beyond_the_outputs_are_told() -> None:
    x = np.zeros((8, 3), np.float32)
    good = [(x, np.arange(8) % 2)] * 3
    problem = parsifl.NeuralProblem(lambda: nn.Linear(3, 2))
    with pytest.raises(DataError, match="labels below its outputs"):
        parsifl.simulate(parsifl.get("fedavg"), problem, [*good, (x, np.full(8, 5))], 1)


def test_a_model_predicts_for_arrays() -> None:
    problem = parsifl.NeuralProblem(lambda: nn.Linear(3, 2))
    found = problem.predict(problem.init(Key(0)), np.zeros((5, 3)))
    assert found.shape == (5, 2)
