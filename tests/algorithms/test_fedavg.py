from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.fixtures import classifier, clients

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import registry, tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import BatchSpec, DataRequest
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.simulate import simulate
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance.harness import difference


def test_one_client_is_plain_sgd() -> None:
    problem, data = classifier(), clients((9,))
    run = simulate(FedAvg(lr=0.2, local_steps=3, batch_size=4), problem, data, 2, executor="loop")
    params, shards = problem.init(Key(0)), BatchSampler(data, problem)
    for number in range(2):
        shard = shards.draw(0, DataRequest({"train": BatchSpec(4, steps=3)}), Key(0, number))
        params = sgd(problem, params, shard["train"], SgdConfig(0.2))
    assert difference(run.server, params) < 1e-14


def test_one_full_step_is_a_gradient_step_on_all_rows() -> None:
    """With one step on all rows and weights by rows, the federation is one big client."""
    problem = classifier()
    apart = clients((4, 8, 12), test=0)
    method = FedAvg(lr=0.2, epochs=1, batch_size=24)
    federated = simulate(method, problem, apart, 3, evaluate_every=0)
    together = simulate(method, problem, clients((24,), test=0), 3, evaluate_every=0)
    assert difference(federated.server, together.server) < 1e-13


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize(
    ("weighting", "shares"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))]
)
def test_the_mean_weighs_as_asked(weighting: Any, shares: tuple[float, float], engine: Any) -> None:
    problem, data = classifier(), clients((4, 12))
    method = FedAvg(lr=0.2, local_steps=2, batch_size=4, weighting=weighting)
    run = simulate(method, problem, data, 1, executor=engine, evaluate_every=0)
    shards, work = BatchSampler(data, problem), DataRequest({"train": BatchSpec(4, steps=2)})
    start = problem.init(Key(0))
    one, two = (
        sgd(problem, start, shards.draw(i, work, Key(0))["train"], SgdConfig(0.2)) for i in (0, 1)
    )
    wanted = {name: shares[0] * one[name] + shares[1] * two[name] for name in one}
    assert difference(run.server, wanted) < 1e-14


def test_a_mean_of_parts_divides_each_leaf_by_what_arrived() -> None:
    one, two = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, {"a": torch.tensor([4.0])}
    first: Mean = tree.accumulate(None, Mean.of(one, 1.0))
    total = tree.accumulate(first, Mean.of(two, 2.0))
    assert total.value()["a"].tolist() == [3.0]
    assert total.value()["b"].tolist() == [2.0]


def test_the_mean_of_one_client_is_what_it_sent() -> None:
    assert Mean.of({"a": torch.tensor([1.5])}, 3.0).value()["a"].tolist() == [1.5]


def test_the_rate_follows_decay_and_milestones() -> None:
    settings = LocalSgd(lr=1.0, lr_decay=0.5, milestones=(2, 4))
    assert [settings.learning_rate(t) for t in (0, 1, 2, 4)] == pytest.approx(
        [1, 0.5, 0.025, 0.000625]
    )


@pytest.mark.parametrize(
    ("settings", "profile", "wanted"),
    [
        ({"local_steps": 5}, {}, BatchSpec(20, steps=5)),
        ({"epochs": 2.0}, {}, BatchSpec(20, epochs=2.0)),
        ({"local_steps": 5}, {"local_steps": 7}, BatchSpec(20, steps=7)),
        ({"local_steps": 5}, {"epochs": 3}, BatchSpec(20, epochs=3)),
        ({"epochs": 2.0}, {"local_steps": 7}, BatchSpec(20, steps=7)),
        ({"epochs": 2.0}, {"epochs": 0.5}, BatchSpec(20, epochs=0.5)),
    ],
)
def test_a_device_profile_overrides_steps_and_epochs(
    settings: dict[str, Any], profile: dict[str, Any], wanted: BatchSpec
) -> None:
    assert LocalSgd(**settings).batch_spec(ClientInfo(0, 50, profile)) == wanted


def test_the_learning_rate_of_a_round_reaches_the_clients() -> None:
    problem, data = classifier(), clients()
    frozen = FedAvg(
        lr=0.5, lr_decay=0.0, local_steps=2, batch_size=4
    )  # 0^0 = 1: only round 0 learns
    runs = [simulate(frozen, problem, data, rounds, evaluate_every=0) for rounds in (1, 4)]
    assert difference(runs[1].server, runs[0].server) < 1e-14


EXCLUSIVE = (
    "`local_steps` and `epochs` are mutually exclusive: got local_steps=20 and epochs=1. "
    "Remove one of them."
)
WITH_BOTH = [n for n, kind in registry.algorithms().items() if issubclass(kind, LocalSgd)]


@pytest.mark.parametrize("name", WITH_BOTH)
def test_explicit_steps_and_epochs_are_mutually_exclusive(name: str) -> None:
    kind: Any = registry.find(name)
    with pytest.raises(ConfigError) as error:
        kind(local_steps=20, epochs=1)
    assert str(error.value) == EXCLUSIVE
    with pytest.raises(ConfigError, match="mutually exclusive: got local_steps=1 and epochs=1"):
        registry.get(name, local_steps="1", epochs="1")
    steps: Any = registry.get(name, local_steps=1, epochs=None)
    assert steps.local_steps == 1


def test_epochs_replace_the_default_of_local_steps() -> None:
    algorithm = FedAvg(epochs=2.0)
    assert (algorithm.local_steps, algorithm.epochs) == (20, 2.0)
    assert replace(algorithm, lr=0.1).epochs == 2.0
    assert copy.deepcopy(algorithm) == algorithm
