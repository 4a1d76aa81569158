from __future__ import annotations

from typing import Any

import pytest
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.batching import BatchSpec, DataRequest
from parsifl.core.keys import Key
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.simulate import simulate
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance.harness import difference

SETTINGS: dict[str, Any] = {"lr": 0.2, "local_steps": 3, "batch_size": 4}
ENGINES: tuple[Any, ...] = ("loop", "fused")


def fedavg_on_shared_batches(problem: Any, data: Any, rounds: int) -> Any:
    """FedAvg by hand, on the batches that Ditto draws for its global model."""
    shards, params = BatchSampler(data, problem), problem.init(Key(0))
    for number in range(rounds):
        parts = []
        for client, rows in enumerate(data.train):
            shard = shards.draw(
                client, DataRequest({"shared": BatchSpec(4, steps=3)}), Key(0, number)
            )
            parts.append((len(rows), sgd(problem, params, shard["shared"], SgdConfig(0.2))))
        total = sum(size for size, _ in parts)
        params = {n: sum(size / total * p[n] for size, p in parts) for n in params}
    return params


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lam", [0.0, 5.0])
def test_the_global_model_is_that_of_fedavg_whatever_lambda(engine: Any, lam: float) -> None:
    problem, data = classifier(), clients()
    run = simulate(Ditto(lam=lam, **SETTINGS), problem, data, 3, executor=engine)
    assert difference(run.server, fedavg_on_shared_batches(problem, data, 3)) < 1e-13


@pytest.mark.parametrize("engine", ENGINES)
def test_without_the_pull_personal_models_are_those_of_clients_alone(engine: Any) -> None:
    problem, data = classifier(), clients()
    run = simulate(Ditto(lam=0.0, **SETTINGS), problem, data, 3, executor=engine)
    shards = BatchSampler(data, problem)
    for client in range(len(data)):
        params = problem.init(Key(0))
        for number in range(3):
            shard = shards.draw(
                client, DataRequest({"personal": BatchSpec(4, steps=3)}), Key(0, number)
            )
            params = sgd(problem, params, shard["personal"], SgdConfig(0.2))
        assert difference(run.personal(client).params, params) < 1e-13


def test_a_strong_pull_keeps_personal_models_near_the_global_one() -> None:
    problem, data = classifier(), clients()
    distances = []
    for lam in (0.0, 1.0, 4.0):
        run = simulate(Ditto(lam=lam, **SETTINGS), problem, data, 4)
        gaps = [tree.subtract(run.personal(i).params, run.server) for i in range(len(data))]
        distances.append(sum(float(tree.norm(gap)) for gap in gaps))
    assert distances[0] > distances[1] > distances[2]


def test_the_personal_model_may_train_longer() -> None:
    problem, data = classifier(), clients((8, 8))
    method = Ditto(personal_epochs=3.0, **SETTINGS)
    work = method.batches(simulate(method, problem, data, 1).pool.clients[0], 0)
    assert work.batches == {"shared": BatchSpec(4, steps=3), "personal": BatchSpec(4, epochs=3.0)}


def test_a_client_that_was_never_drawn_is_judged_on_the_model_it_receives() -> None:
    problem, data = classifier(), clients((6,) * 5)
    run = simulate(Ditto(**SETTINGS), problem, data, 1, participation=0.2)
    trained = {client for client, _ in run.pool.store}
    assert len(trained) == 1
    for client in set(range(5)) - trained:
        assert tree.same(run.personal(client).params, run.server)


def test_only_the_global_model_travels() -> None:
    problem, data = classifier(), clients()
    ditto = simulate(Ditto(**SETTINGS), problem, data, 2)
    plain = simulate(FedAvg(**SETTINGS), problem, data, 2)
    assert (ditto.bytes_up, ditto.bytes_down) == (plain.bytes_up, plain.bytes_down)
