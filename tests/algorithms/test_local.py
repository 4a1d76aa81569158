from __future__ import annotations

from typing import Any

import pytest
from tests.support.fixtures import classifier, clients

from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.local import Local
from parsifl.core import tree
from parsifl.core.batching import BatchSpec, DataRequest
from parsifl.core.keys import Key
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.simulate import simulate
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance.harness import difference

SETTINGS: dict[str, Any] = {"lr": 0.2, "local_steps": 3, "batch_size": 4}


@pytest.mark.parametrize("engine", ["loop", "fused"])
def test_every_client_trains_alone_from_the_same_start(engine: Any) -> None:
    problem, data = classifier(), clients()
    run = simulate(Local(**SETTINGS), problem, data, 3, executor=engine)
    shards = BatchSampler(data, problem)
    for client in range(len(data)):
        params = problem.init(Key(0))
        for number in range(3):
            shard = shards.draw(
                client, DataRequest({"train": BatchSpec(4, steps=3)}), Key(0, number)
            )
            params = sgd(problem, params, shard["train"], SgdConfig(0.2))
        assert difference(run.personal(client).params, params) < 1e-13


def test_nothing_is_sent_and_there_is_no_global_model() -> None:
    run = simulate(Local(**SETTINGS), classifier(), clients(), 2)
    assert run.bytes_up == run.bytes_down == 0
    assert run.server is None
    assert run.summary()["global"] is None
    assert run.summary()["personal"]["mean"] >= 0


def test_other_clients_do_not_matter() -> None:
    problem = classifier()
    alone, among = (
        simulate(Local(**SETTINGS), problem, clients(sizes), 2, executor="loop")
        for sizes in ((6,), (6, 9))  # the first client has the same rows in both
    )
    assert tree.same(alone.personal(0).params, among.personal(0).params)


def test_ditto_without_a_pull_has_as_many_steps_as_local() -> None:
    problem, data = classifier(), clients()
    ditto = simulate(Ditto(lam=0.0, **SETTINGS), problem, data, 2)
    local = simulate(Local(**SETTINGS), problem, data, 2)
    assert ditto.metrics[0]["flops"] == 2 * local.metrics[0]["flops"]
