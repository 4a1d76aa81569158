from __future__ import annotations

from typing import Any

import pytest
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fedprox import FedProx
from parsifl.core import tree
from parsifl.core.keys import Key
from parsifl.engine.simulate import simulate
from parsifl.testing.conformance.harness import difference

SETTINGS: dict[str, Any] = {
    "lr": 0.2,
    "local_steps": 4,
    "batch_size": 4,
    "momentum": 0.5,
    "weight_decay": 0.01,
}


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_without_the_proximal_term_it_is_fedavg(engine: Any) -> None:
    problem, data = classifier(), clients()
    prox = simulate(
        FedProx(mu=0.0, **SETTINGS), problem, data, 3, executor=engine, participation=0.5
    )
    plain = simulate(FedAvg(**SETTINGS), problem, data, 3, executor=engine, participation=0.5)
    assert difference(prox.server, plain.server) < 1e-14


def test_one_step_does_not_feel_the_proximal_term() -> None:
    problem, data = classifier(), clients()
    settings = {**SETTINGS, "local_steps": 1}
    prox = simulate(FedProx(mu=3.0, **settings), problem, data, 2)
    plain = simulate(FedAvg(**settings), problem, data, 2)
    assert difference(prox.server, plain.server) < 1e-13


def test_a_stronger_pull_keeps_clients_nearer_to_the_model() -> None:
    problem, data = classifier(), clients()
    start = problem.init(Key(0))
    moved = [
        float(tree.norm(tree.subtract(simulate(method, problem, data, 1).server, start)))
        for method in (
            FedProx(mu=mu, lr=0.2, local_steps=8, batch_size=4) for mu in (0.0, 0.5, 2.0)
        )
    ]
    assert moved[0] > moved[1] > moved[2] > 0
