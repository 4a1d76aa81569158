from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parsifl import tree
from parsifl.algorithms.ditto import Ditto
from parsifl.engine import forked
from parsifl.engine.simulate import simulate
from parsifl.engine.tasks import Outcome, Task, run_alone
from parsifl.problems.neural import NeuralProblem
from parsifl.testing.conformance.trial import snapshot
from parsifl.testing.toys import clients

pytestmark = pytest.mark.skipif(not forked.CAN_FORK, reason="needs fork")


def tasks(count: int) -> list[Task]:
    return [Task(i, (torch.full((2, 3), float(i), dtype=torch.float64),)) for i in range(count)]


def work(x: Tensor) -> dict[str, Any]:
    return {"t": (x @ x.T).t(), "n": 7, "s": x.sum()}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("clients", [0, 1, 5])
def test_every_number_of_processes_gives_the_bits_of_the_loop(count: int, clients: int) -> None:
    alone = Outcome()
    for task in tasks(clients):
        run_alone(work, task, alone)
    outcome = forked.run_forked(work, tasks(clients), count)
    assert sorted(outcome.results) == list(range(clients))
    assert all(tree.same(outcome.results[i], alone.results[i]) for i in range(clients))
    assert not outcome.fallbacks


def test_a_client_that_raises_in_a_process_is_named() -> None:
    def picky(x: Tensor) -> Tensor:
        if float(x[0, 0]) in (1.0, 2.0):
            raise ValueError("not this one")
        return x

    outcome = forked.run_forked(picky, tasks(4), 2)
    assert outcome.failures == {1: "ValueError: not this one", 2: "ValueError: not this one"}
    assert sorted(outcome.results) == [0, 3]


def test_the_work_of_a_process_that_is_killed_is_done_here() -> None:
    parent = os.getpid()

    def deadly(x: Tensor) -> Tensor:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1

    outcome = forked.run_forked(deadly, tasks(5), 2)
    assert sorted(outcome.results) == [0, 1, 2, 3, 4]
    assert outcome.fallbacks == ["a worker process ended early with 2 clients"]


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    forked.run_forked(work, tasks(3), 2)
    assert torch.get_num_threads() == before
    assert forked.workers() >= 1


def test_a_convolutional_run_gives_the_bits_of_the_loop() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)
        )

    problem, data = NeuralProblem(build, dtype=torch.float64), clients()
    method = Ditto(lr=0.1, steps=2, batch=4)
    auto, loop = (simulate(method, problem, data, 2, engine=e) for e in ("auto", "sequential"))
    assert tree.same(snapshot(auto), snapshot(loop))
    assert auto.metrics[-1]["personal"] == loop.metrics[-1]["personal"]
