"""Clients compute on the device of their pool; everything else stays on the CPU.

The device of these tests is `meta`, which every machine has. It rejects operations that mix it with
the CPU, and it has shapes but no values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import parsifl
from parsifl.algorithms.ditto import Ditto
from parsifl.core import registry, tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.engine.executors import CPU, check_device, choose_executor, placed
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram, ClientRequest, ClientResult
from parsifl.testing.conformance import harness_for, small
from parsifl.testing.fixtures import classifier, clients

META = torch.device("meta")


def devices(value: Any) -> set[torch.device]:
    return {leaf.device for leaf in tree.leaves(value)}


@pytest.mark.parametrize("name", registry.algorithms())
def test_every_algorithm_computes_on_another_device(name: str) -> None:
    harness = harness_for(small(registry.find(name)))
    step = harness.first.client_steps[0]
    arguments = tree.map(lambda leaf: leaf.to(META), (step.down, step.client, step.shard))
    update = ClientProgram(harness.algorithm, harness.problem)(*arguments)
    assert devices((update.state, update.upload)) <= {META}
    assert tree.structure(update.upload) == tree.structure(step.result.upload)


@dataclass(frozen=True, eq=False)
class Elsewhere(ClientProgram):
    """Checks where its arguments are; computes with those of the CPU, which have values."""

    known: dict[int, ClientUpdate[Any, Any]] = field(default_factory=dict)
    seen: list[set[torch.device]] = field(default_factory=list)

    def __call__(self, received: Any, state: Any, data: ClientRoundData) -> ClientUpdate[Any, Any]:
        self.seen.append(devices((received, state, data)))
        return self.known[len(self.seen) - 1]


def test_a_pool_moves_arguments_to_its_device_and_results_back() -> None:
    problem, data = classifier(), clients((6, 9))
    method = Ditto(lr=0.1, local_steps=2, batch_size=4)
    infos = [ClientInfo(0, 6), ClientInfo(1, 9)]
    server = method.init_server(problem, infos, Key(0))
    requests = [
        ClientRequest(i, Key(0), method.broadcast(problem, server, i, Key(0))) for i in infos
    ]

    here = list(LocalPool(ClientProgram(method, problem), data).train(requests))
    updates = {
        number: ClientUpdate(None, answer.upload, answer.metrics)
        for number, answer in enumerate(here)
        if isinstance(answer, ClientResult)
    }
    program = Elsewhere(method, problem, updates)
    there = list(LocalPool(program, data, device=META).train(requests))
    assert program.seen == [{META}, {META}]
    for answer, expected in zip(there, here, strict=True):
        assert isinstance(answer, ClientResult)
        assert isinstance(expected, ClientResult)
        assert devices(answer.upload) == {CPU}
        assert tree.same(answer.upload, expected.upload)


def test_the_cpu_needs_no_move() -> None:
    assert placed(len, CPU) is len


@pytest.mark.parametrize("device", ["meta", "nonsense", 3.5])
def test_a_device_that_cannot_be_used_is_an_error(device: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the device 'cuda' cannot be used"):
        parsifl.simulate(Ditto(local_steps=1), classifier(), clients((6, 9)), 1, device="cuda")


def test_executors_that_are_made_for_the_cpu_are_rejected_elsewhere() -> None:
    assert choose_executor("auto", classifier(), cpu=False)[0] == "vmap"
    assert choose_executor("loop", classifier(), cpu=False)[0] == "loop"
    with pytest.raises(ConfigError, match="made for the CPU: use 'vmap' or 'loop'"):
        choose_executor("fused", classifier(), cpu=False)
