from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import ConfigError
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem
from parsifl.testing.fixtures import classifier, clients


def test_a_client_that_does_not_exist_is_refused() -> None:
    run = simulate(FedAvg(local_steps=1), classifier(), clients((6, 9)), 1, evaluate_every=0)
    for client in (-1, 2):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            run.personal(client)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"evaluate_every": -1}])
def test_impossible_counts_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number and at least"):
        simulate(FedAvg(), classifier(), clients(), **{"rounds": 1, **change})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown precision 'int9'; did you mean 'int8'"):
        simulate(FedAvg(), classifier(), clients(), 1, precision="int9")  # type: ignore[arg-type]  # a user's mistake


def test_own_arrays_and_own_module_are_enough() -> None:
    generator = np.random.default_rng(0)
    own = [(generator.normal(size=(8, 4)), generator.integers(0, 3, 8)) for _ in range(3)]
    run = simulate(FedAvg(lr=0.1, local_steps=2), NeuralProblem(nn.Linear(4, 3)), own, 2)
    assert run.metrics[-1]["global"]["test"]["accuracy"]["mean"] >= 0
    assert run.bytes_up > 0
    assert run.model.params["weight"].shape == (3, 4)
