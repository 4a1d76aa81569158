"""The fused path against the generic one: autograd under vmap, or in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.fixtures import classifier, clients
from torch import Tensor, nn

from parsifl.core import tree
from parsifl.core.batching import Batches, BatchSpec, DataRequest
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.data.clients import ClientData
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.executors import Task
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers import fused
from parsifl.solvers.coupled import Coupled, alternate
from parsifl.solvers.maml import first_order_maml
from parsifl.solvers.sgd import SgdConfig, gradient, sgd, sgd_pair
from parsifl.solvers.update_rules import LinearRule
from parsifl.testing.conformance.harness import difference

SIZES = (6, 11, 9)
Solver = Callable[[Problem, Params, Batches], Any]


def two_ways(
    problem: NeuralProblem, data: ClientData, solve: Solver, *, alike: bool = False, **draw: Any
) -> float:
    """Return how far the fused results of a block are from those of the loop.

    Clients begin at points of their own, or all at the same one.
    """
    work = DataRequest({"t": BatchSpec(**{"batch_size": 4, "epochs": 2, **draw})})
    shards = BatchSampler(data, problem)
    start = problem.init(Key(3))
    tasks = [
        Task(
            client,
            (
                start if alike else tree.scale(1 + 0.1 * client, start),
                shards.draw(client, work, Key(2))["t"],
            ),
        )
        for client in range(len(data.train))
    ]

    def local(params: Params, batches: Batches) -> Any:
        return solve(problem, params, batches)

    found = executors.run(local, tasks, "fused", 10)
    wanted = executors.run(local, tasks, "loop", 10)
    assert not found.fallbacks
    assert not found.failures
    assert not wanted.failures
    assert max(map(len, found.blocks)) == len(tasks)
    return max(difference(found.results[i], wanted.results[i]) for i in wanted.results)


def plain(problem: Problem, params: Params, batches: Batches) -> Params:
    return sgd(problem, params, batches, SgdConfig(0.1))


def first_gradient(problem: Problem, params: Params, batches: Batches) -> Params:
    return gradient(problem, params, batches.batch(0))


def with_everything(problem: Problem, params: Params, batches: Batches) -> Any:
    rule = Coupled(rate=0.5, lam=0.3, decay=0.1, gamma=0.2, gamma_w=0.1)
    return sgd_pair(problem, params, batches, SgdConfig(0.1, 0.5, 0.1), rule=rule, aux=(params,))


def head_only(problem: Problem, params: Params, batches: Batches) -> Params:
    names = sorted(params)[-2:]
    trained = {name: params[name] for name in names}
    fixed = {name: value for name, value in params.items() if name not in names}
    return sgd(
        problem,
        trained,
        batches,
        SgdConfig(0.1),
        frozen=fixed,
        rule=LinearRule(0.2),
        aux=(trained,),
    )


def body_only(problem: Problem, params: Params, batches: Batches) -> Params:
    names = sorted(params)[:1]
    trained = {name: params[name] for name in names}
    fixed = {name: value for name, value in params.items() if name not in names}
    found = gradient(problem, trained, batches.batch(0), fixed)
    return tree.axpy(
        -0.1, found, sgd(problem, trained, batches, SgdConfig(0.1, weight_decay=0.3), frozen=fixed)
    )


def maml(problem: Problem, params: Params, batches: Batches) -> Params:
    config = SgdConfig(0.1, weight_decay=0.05)
    return first_order_maml(problem, params, batches, config, inner_lr=0.2)


def solved(problem: Problem, params: Params, batches: Batches) -> Any:
    rule = Coupled(rate=0.5, lam=0.3, gamma=0.2)
    return alternate(problem, params, batches, SgdConfig(0.1), rule=rule, inner=3, accuracy=0.1)


SOLVERS = (plain, first_gradient, with_everything, head_only, body_only, maml, solved)


@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_a_block_of_unequal_clients_takes_the_steps_of_the_loop(solve: Solver) -> None:
    assert two_ways(classifier(), clients(SIZES), solve) < 1e-12


@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_gradients_by_hand_are_really_taken(solve: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests here: without autograd no loss is ever called."""
    problem = classifier()
    monkeypatch.setattr(torch.func, "grad", None)
    data, work = clients(SIZES), DataRequest({"t": BatchSpec(batch_size=4, steps=2)})
    shards = BatchSampler(data, problem)
    params = problem.init(Key(3))
    tasks = [Task(i, (shards.draw(i, work, Key(2))["t"],)) for i in range(3)]
    outcome = executors.run(lambda batches: solve(problem, params, batches), tasks, "fused", 10)
    assert not outcome.fallbacks
    assert not outcome.failures


def test_a_gradient_of_a_gradient_is_left_to_autograd() -> None:
    problem = classifier()
    data, work = clients(SIZES), DataRequest({"t": BatchSpec(batch_size=4, steps=1)})
    drawn = BatchSampler(data, problem).draw(0, work, Key(2))["t"].batch(0)
    params = problem.init(Key(3))

    def curved(scale: Tensor) -> Tensor:
        def size(factor: Tensor) -> Tensor:
            found = gradient(problem, tree.scale(factor, params), drawn)
            return tree.dot(found, found)

        value: Tensor = torch.func.grad(size)(scale)
        return value

    with fused.fused_steps():
        found = torch.func.vmap(curved)(torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert torch.isfinite(found).all()
    assert found[0] != found[1]


@pytest.mark.parametrize("entries", [1, 8])
@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_weights_may_move_a_few_clients_at_a_time(
    solve: Solver, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_LINEAR", "_BENT"):
        monkeypatch.setattr(f"parsifl.solvers.fused.steps.{limit}", entries)
    assert two_ways(classifier(), clients(SIZES), solve) < 1e-12


@pytest.mark.parametrize("entries", [1, 1 << 20])
@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_a_weight_that_all_begin_with_may_lie_across(
    solve: Solver, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parsifl.solvers.fused.steps._BROAD", 1)
    for limit in ("_LINEAR", "_BENT"):
        monkeypatch.setattr(f"parsifl.solvers.fused.steps.{limit}", entries)
    assert two_ways(classifier(), clients(SIZES), solve, alike=True) < 1e-12


@pytest.mark.parametrize("outputs", [63, 64])
def test_a_broad_first_weight_lies_across_where_clients_begin_alike(outputs: int) -> None:
    """Guards the test above."""
    hidden = nn.Sequential(nn.Linear(4, outputs), nn.ReLU(), nn.Linear(outputs, 3))
    problem = NeuralProblem(lambda: hidden, dtype=torch.float64)
    data, work = clients(SIZES), DataRequest({"t": BatchSpec(batch_size=4, steps=2)})
    shards, params = BatchSampler(data, problem), problem.init(Key(3))
    tasks = [Task(i, (shards.draw(i, work, Key(2))["t"],)) for i in range(3)]
    outcome = executors.run(lambda batches: plain(problem, params, batches), tasks, "fused", 10)
    assert not outcome.fallbacks
    for result in outcome.results.values():
        assert result["0.weight"].is_contiguous() == (outputs < 64)
        assert result["2.weight"].is_contiguous()
