from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.engine.choice import choose_executor
from parsifl.engine.simulate import simulate
from parsifl.errors import ConfigError
from parsifl.problems.neural import NeuralProblem
from parsifl.testing.conformance.examples import restricted
from parsifl.testing.toys import classifier, clients


def test_the_executor_follows_engine_and_problem() -> None:
    mlp = classifier()
    layers = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)]
    shallow = NeuralProblem(nn.Sequential(*layers[:2], nn.Flatten(), nn.Linear(16, 3)))
    deep = NeuralProblem(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)))
    other = restricted(mlp, ())
    chosen = {
        (engine, name): choose_executor(engine, problem)[0]
        for engine in ("auto", "sequential", "batched")
        for name, problem in (("mlp", mlp), ("shallow", shallow), ("deep", deep), ("other", other))
    }
    assert {chosen["sequential", name] for name in ("mlp", "deep", "other")} == {"loop"}
    assert chosen["auto", "mlp"] == chosen["batched", "mlp"] == "fused"
    assert chosen["auto", "other"] == chosen["batched", "other"] == "vmap"
    assert chosen["auto", "shallow"] == "fused"
    assert chosen["auto", "deep"] == "threads"  # many batched convolutions are slower
    blocks = [choose_executor("auto", problem)[1] for problem in (mlp, shallow, other)]
    assert blocks == [20, 10, 10]


def test_a_problem_that_cannot_be_batched_runs_in_the_loop() -> None:
    class Alone:
        batchable = False

    problem: Any = Alone()
    assert choose_executor("batched", problem)[0] == "loop"


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batched'"):
        simulate(FedAvg(), classifier(), clients(), 1, engine="bached")  # type: ignore[arg-type]  # a user's mistake
