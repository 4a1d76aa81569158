from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import ConfigError
from parsifl.engine.executors import choose_executor
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem
from parsifl.testing.conformance.examples import restricted
from parsifl.testing.fixtures import classifier, clients


def test_the_executor_follows_engine_and_problem() -> None:
    mlp = classifier()
    layers = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)]
    shallow = NeuralProblem(nn.Sequential(*layers[:2], nn.Flatten(), nn.Linear(16, 3)))
    deep = NeuralProblem(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)))
    other = restricted(mlp, ())
    chosen = {
        (engine, name): choose_executor(engine, problem)[0]
        for engine in ("auto", "loop", "fused")
        for name, problem in (("mlp", mlp), ("shallow", shallow), ("deep", deep), ("other", other))
    }
    assert {chosen["loop", name] for name in ("mlp", "deep", "other")} == {"loop"}
    assert chosen["auto", "mlp"] == chosen["fused", "mlp"] == "fused"
    assert chosen["auto", "other"] == chosen["fused", "other"] == "vmap"
    assert chosen["auto", "shallow"] == "fused"
    assert chosen["auto", "deep"] == "threads"  # many batched convolutions are slower
    blocks = [choose_executor("auto", problem)[1] for problem in (mlp, shallow, other)]
    assert blocks == [20, 10, 10]


@pytest.mark.parametrize("engine", ["auto", "fused"])
def test_clients_with_sparse_rows_train_one_after_the_other(engine: Any) -> None:
    rows = [(csr_matrix(np.eye(6) * (1 + i)), np.arange(6.0)) for i in range(3)]
    dense = [(x.toarray(), y) for x, y in rows]
    method, problem = FedAvg(local_steps=2, batch_size=3), GLM(6)
    sparse = simulate(method, problem, rows, 2, executor=engine)
    assert sparse.metrics[0]["executor"] == "loop"
    batched = simulate(method, problem, dense, 2, executor=engine)
    assert batched.metrics[0]["executor"] == "vmap"
    torch.testing.assert_close(sparse.model.params, batched.model.params)


class Recurrent(nn.Module):
    """Reads four features one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.memory(x[:, :, None])[0]
        return states[:, -1]


@pytest.mark.parametrize(("engine", "executor"), [("auto", "threads"), ("fused", "vmap")])
def test_recurrent_layers_run_without_advice_of_torch(engine: Any, executor: str) -> None:
    problem = NeuralProblem(Recurrent, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = simulate(FedAvg(local_steps=2), problem, clients(), 1, executor=engine)
    assert run.metrics[0]["executor"] == executor
    assert not run.metrics[0]["notes"]
    assert not told


def test_a_problem_that_cannot_be_batched_runs_in_the_loop() -> None:
    class Alone:
        supports_vmap = False

    problem: Any = Alone()
    assert choose_executor("fused", problem)[0] == "loop"


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="known: auto, fused, loop"):
        simulate(FedAvg(), classifier(), clients(), 1, executor="bached")  # type: ignore[arg-type]  # a user's mistake
