from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.scaffold import Scaffold
from parsifl.core import tree
from parsifl.core.keys import Key
from parsifl.engine.simulate import simulate
from parsifl.testing.conformance.harness import difference

SETTINGS: dict[str, Any] = {"lr": 0.2, "local_steps": 3, "batch_size": 4}
ENGINES: tuple[Any, ...] = ("loop", "fused")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_round_is_that_of_fedavg_with_equal_weights(engine: Any) -> None:
    problem, data = classifier(), clients()
    scaffold = simulate(Scaffold(**SETTINGS), problem, data, 1, executor=engine)
    plain = simulate(FedAvg(weighting="uniform", **SETTINGS), problem, data, 1, executor=engine)
    assert difference(scaffold.server.params, plain.server) < 1e-14


def test_a_control_is_the_mean_gradient_of_its_round() -> None:
    """In the first round c_i+ = (w - w_i) / (K eta), so that w_i = w - K eta c_i+."""
    problem, data = classifier(), clients((6,))
    run = simulate(Scaffold(**SETTINGS), problem, data, 1)
    ((_, control),) = run.pool.store
    wanted = tree.axpy(-3 * 0.2, control, problem.init(Key(0)))
    assert difference(run.server.params, wanted) < 1e-14
    assert difference(run.server.control, control) < 1e-14


def test_the_server_control_is_the_mean_of_all_clients_even_if_few_take_part() -> None:
    problem, data = classifier(), clients((6, 9, 8, 7))
    run = simulate(Scaffold(**SETTINGS), problem, data, 6, participation=0.5)
    total = tree.zeros_like(run.server.control)
    for _, control in run.pool.store:
        total = tree.add(total, control)
    assert difference(run.server.control, tree.scale(1 / 4, total)) < 1e-13


def test_one_step_on_all_rows_is_gradient_descent_whatever_the_controls() -> None:
    """With equal sizes the corrections cancel in the mean of one full-batch step."""
    problem, data = classifier(), clients((8, 8, 8))
    one: dict[str, Any] = {"lr": 0.2, "local_steps": 1, "batch_size": 8}
    scaffold = simulate(Scaffold(**one), problem, data, 4)
    plain = simulate(FedAvg(weighting="uniform", **one), problem, data, 4)
    assert difference(scaffold.server.params, plain.server) < 1e-12


def test_the_server_step_scales_the_move() -> None:
    problem, data = classifier(), clients()
    start = problem.init(Key(0))
    moves = [
        tree.subtract(
            simulate(Scaffold(server_lr=rate, **SETTINGS), problem, data, 1).server.params, start
        )
        for rate in (1.0, 0.5)
    ]
    assert difference(moves[1], tree.scale(0.5, moves[0])) < 1e-14


@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_without_steps_keeps_its_control(engine: Any) -> None:
    problem = classifier()
    lazy = clients((6, 9, 8), profiles=[{}, {"local_steps": 0}, {}])
    run = simulate(Scaffold(**SETTINGS), problem, lazy, 3, executor=engine)
    states = dict(run.pool.store)
    assert all(bool((value == 0).all()) for value in states[1].values())
    assert any(bool((value != 0).any()) for value in states[0].values())


def test_two_models_travel_each_way() -> None:
    problem, data = classifier(), clients()
    scaffold = simulate(Scaffold(**SETTINGS), problem, data, 2)
    plain = simulate(FedAvg(**SETTINGS), problem, data, 2)
    assert scaffold.metrics[1]["dense_up"] == 2 * plain.metrics[1]["dense_up"]
    assert scaffold.metrics[1]["dense_down"] == 2 * plain.metrics[1]["dense_down"]
    assert torch.equal(scaffold.personal(0).params["0.bias"], scaffold.server.params["0.bias"])
