from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import fixtures
from torch import nn

from parsifl.algorithms.perfedmask import PerFedMask
from parsifl.core import registry
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.costs import Cost, FlopCounter
from parsifl.engine.settings import NetworkModel
from parsifl.engine.simulate import simulate
from parsifl.nn import models
from parsifl.nn.neural import NeuralProblem


def device_costs(factory: Callable[[], nn.Module], nu: float, devices: int = 10) -> list[Cost]:
    """Return what a weak and a strong device spend on a step of 50 pictures, by the engine."""
    problem = NeuralProblem(factory)
    picture = (torch.zeros(50, 3, 32, 32), torch.arange(50) % 10)
    data = ClientData.of([picture] * 2, test=0.0)
    strong = round(nu * devices)
    profiles: list[dict[str, Any]] = [{"budget": 0.125}] * (devices - strong) + [{}] * strong
    both = replace(data, profiles=(profiles[0], profiles[-1]))
    method = PerFedMask(batch_size=50, local_steps=1, last_batch="wrap")
    infos = [replace(Infos(both)[0], id=n, profile=profiles[n]) for n in range(devices)]
    server = method.init_server(problem, infos, Key(0))
    counter, found = FlopCounter(method, problem), []
    for info in (infos[0], infos[-1]):
        down = method.broadcast(problem, server, info, Key(0))
        state = method.init_client(problem, info, down, Key(0))
        shard = BatchSampler(both, problem).draw(0, method.batches(info, 0), Key(0))
        cost = counter.count(down, state, shard)
        assert cost is not None
        found.append(cost)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "body"),
    [("preresnet18", 0.24, 11_167_040), ("mobilenet", 0.30, 3_206_976)],
)
def test_optimal_masks_save_weak_devices_backward_operations(
    name: str, saved: float, body: int
) -> None:
    weak, strong = device_costs(lambda: models.build(name, classes=10), 0.5)
    assert strong.trainable == body
    assert weak.trainable is not None
    assert weak.trainable <= body / 8
    assert weak.forward == strong.forward
    assert 1 - weak.backward / strong.backward == pytest.approx(saved, abs=0.01)


def linear_costs(rows: int) -> tuple[int, int]:
    """Count the products of 4-5-3: forward; backward without the input gradient of layer one."""
    return 2 * rows * (4 * 5 + 5 * 3), 2 * rows * (4 * 5 + 2 * 5 * 3)


def test_both_passes_trainable_and_sent_parameters_are_in_every_record() -> None:
    data = fixtures.clients((6, 9, 8), profiles=[{"local_steps": 1}, {}, {}])
    run = simulate(
        registry.get("fedavg", batch_size=3, local_steps=2), fixtures.classifier(), data, 2
    )
    forward, backward = linear_costs(3)
    everything = 4 * 5 + 5 + 5 * 3 + 3
    for record in run.metrics:
        assert record["flops"] == 5 * (forward + backward)
        assert (record["parameters_up"], record["parameters_down"]) == (3 * everything,) * 2
        assert record["devices"] == [
            {"clients": 1, "forward": forward, "backward": backward,
             "trainable": everything, "sent": everything},
            {"clients": 2, "forward": 2 * forward, "backward": 2 * backward,
             "trainable": everything, "sent": everything},
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["perfedavg", "fedper", "ditto", "apfl"])
def test_gradients_by_other_ways_are_counted_too(name: str) -> None:
    method = registry.get(name, batch_size=3, local_steps=1)
    run = simulate(method, fixtures.classifier(), fixtures.clients((6, 6)), 1)
    (row,) = run.metrics[0]["devices"]
    assert row["backward"] > row["forward"] > 0
    assert row["trainable"] == 43


def test_idle_work_costs_nothing() -> None:
    run = simulate(
        registry.get("fedavg", local_steps=0), fixtures.classifier(), fixtures.clients((6, 6)), 1
    )
    (row,) = run.metrics[0]["devices"]
    assert (row["forward"], row["backward"], row["trainable"]) == (0, 0, 0)


def test_a_cost_is_a_number_with_parts() -> None:
    cost = Cost(3, 4, 2)
    assert (cost + 1, cost.forward, cost.backward, cost.trainable) == (8, 3, 4, 2)


def test_work_that_is_no_tensor_is_not_counted() -> None:
    problem: Problem = fixtures.classifier()
    shards = BatchSampler(fixtures.clients(), problem)
    method = registry.get("fedavg", batch_size=3, local_steps=1)
    info = Infos(fixtures.clients())[0]
    shard = shards.draw(0, method.batches(info, 0), Key(0))
    counter = FlopCounter(method, problem)
    assert counter.count({"x": None}, None, shard) is None


def test_seconds_add_latency_transfer_and_computing() -> None:
    network = NetworkModel(latency=0.15, up=100.0, down=1000.0)
    device = {"flops_per_second": 1e6}
    assert network.seconds(200, 500, 3_000_000, device) == pytest.approx(0.3 + 2 + 0.5 + 3)
    assert network.seconds(0, 500, None, device) == pytest.approx(0.15 + 0.5)
    assert network.seconds(0, 0, 3_000_000, {}) == 0.0
    assert NetworkModel().seconds(10**9, 10**9, None, {}) == 0.0


@pytest.mark.parametrize("setting", [{"up": 0.0}, {"down": -1.0}, {"latency": -0.1}])
def test_an_impossible_network_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"NetworkModel\."):
        NetworkModel(**setting)
