from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import parsifl
from parsifl.algorithms.fedavg import FedAvg
from parsifl.errors import CapabilityError, ConfigError, DataError
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


def linear() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rounds": 1.5}, r"rounds must be a whole number and at least 1, got 1\.5"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"rounds": "3"}, "rounds must be a whole number and at least 1, got '3'"),
        ({"seed": -1}, "seed must be a whole number and at least 0, got -1"),
        ({"evaluate_every": None}, "evaluate_every must be a whole number"),
        ({"participation": "half"}, "participation must be a number above 0 and at most 1"),
        ({"algorithm": "ditto"}, r"got 'ditto'; write parsifl\.get\('ditto'\)"),
        ({"algorithm": FedAvg}, r"got the class FedAvg; write parsifl\.get"),
        ({"problem": linear()}, r"the bare module Linear; write parsifl\.NeuralProblem"),
        ({"problem": parsifl.NeuralProblem}, "got the class NeuralProblem"),
        ({"problem": None}, "got None"),
        ({"clients": None}, r"one \(X, y\) for each client.*got None"),
        ({"clients": "digits"}, "got a str"),
        ({"clients": 20}, "got a int"),
        ({"evaluation": {"select": "last"}}, r"evaluation must be parsifl\.Evaluation"),
        ({"network": 3}, r"network must be parsifl\.Network"),
        ({"folder": 3}, "folder must be a path, got a int"),
        ({"problem": parsifl.NeuralProblem(nn.Identity)}, "has no parameters"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(change: dict[str, Any], told: str) -> None:
    given = {
        "algorithm": FedAvg(steps=1),
        "problem": parsifl.NeuralProblem(linear, dtype=torch.float64),
        "clients": clients(),
        "rounds": 1,
    }
    with pytest.raises(ConfigError, match=told):
        parsifl.simulate(**{**given, **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_told() -> None:
    problem = parsifl.NeuralProblem(linear, device="cuda")
    with pytest.raises(ConfigError, match="the device 'cuda' cannot be used"):
        parsifl.simulate(FedAvg(steps=1), problem, clients(), 1)


def test_numbers_of_numpy_are_numbers() -> None:
    problem = parsifl.NeuralProblem(linear, dtype=torch.float64)
    options = {"rounds": np.int64(1), "seed": np.int32(3), "participation": np.float64(0.5)}
    run = parsifl.simulate(FedAvg(steps=1), problem, clients(), **options)  # type: ignore[arg-type]  # on purpose
    assert len(run.metrics) == 1


def test_a_folder_with_more_rounds_than_asked_for_is_told(tmp_path: Path) -> None:
    problem = parsifl.NeuralProblem(linear, dtype=torch.float64)
    parsifl.simulate(FedAvg(steps=1), problem, clients(), 3, folder=tmp_path)
    with pytest.raises(ConfigError, match="already has 3 rounds, more than the 2 asked for"):
        parsifl.simulate(FedAvg(steps=1), problem, clients(), 2, folder=tmp_path, resume=True)
    again = parsifl.simulate(FedAvg(steps=1), problem, clients(), 3, folder=tmp_path, resume=True)
    assert len(again.metrics) == 3
