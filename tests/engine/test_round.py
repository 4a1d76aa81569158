"""Rounds through `simulate`: failures, cohorts, gathering, absent leaves, lossy messages."""

# ruff: noqa: ARG002 - the contract names every argument

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
from tests.support.fixtures import TinyFedAvg, classifier, clients
from torch import Tensor, nn

from parsifl import wire
from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.local import Local as LocalOnly
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate, ClientUpload, GatherAlgorithm
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import ClientError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.data.clients import ClientData
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram
from parsifl.engine.settings import NetworkModel
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd, Training
from parsifl.nn.neural import NeuralProblem
from parsifl.testing.conformance.harness import difference

ENGINES: tuple[Any, ...] = ("loop", "fused")


def with_nan(data: ClientData, client: int) -> ClientData:
    assert isinstance(data.x, Tensor)
    x = data.x.clone()
    x[data.train[client]] = torch.nan
    return replace(data, x=x)


# ---------------------------------------------------------------------- failures
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_bad_data_is_dropped_and_named_and_the_others_go_on(engine: Any) -> None:
    method, problem = Ditto(lr=0.1, local_steps=2, batch_size=4), classifier()
    data = with_nan(clients((6, 9, 8)), 1)
    run = simulate(method, problem, data, 2, executor=engine, evaluate_every=0)
    for record in run.metrics:
        assert list(record["dropped"]) == [1]
        assert record["dropped"][1].startswith("its loss is nan at the initial parameters")
        assert record["trained"] == 2
    assert sorted(client for client, _ in run.pool.store) == [0, 2]  # its state stays as it was
    assert tree.is_finite(run.server)


def test_the_rest_of_the_round_is_as_if_the_bad_client_had_not_been_there() -> None:
    method, problem = FedAvg(lr=0.1, local_steps=2, batch_size=4), classifier()
    data = with_nan(clients((6, 9, 8)), 2)
    healthy = replace(
        data,
        train=data.train[:2],
        validation=data.validation[:2],
        test=data.test[:2],
        profiles=data.profiles[:2],
    )
    broken = simulate(method, problem, data, 2, executor="loop", evaluate_every=0)
    alone = simulate(method, problem, healthy, 2, executor="loop", evaluate_every=0)
    assert tree.same(broken.server, alone.server)


@final
@dataclass(frozen=True)
class Weak(TinyFedAvg):
    """Fail on one client from the second round on."""

    @dataclass(frozen=True)
    class _Down:
        params: Params
        weak: Tensor

    def broadcast(  # type: ignore[override]  # a message of its own
        self, problem: Problem, server: Params, client: ClientInfo, key: Key
    ) -> Weak._Down:
        """Tell the weak client."""
        return Weak._Down(server, torch.tensor(client.id == 1 and key.round > 0))

    def client_update(
        self, problem: Problem, received: Any, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train, or raise."""
        if bool(received.weak):
            raise MemoryError("out of memory")
        return super().client_update(problem, received.params, state, data)

    def personalize(
        self, problem: Problem, received: Any, state: None, data: ClientRoundData
    ) -> Model:
        """Judge the model."""
        return Model(problem, received.params)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_raises_is_dropped_and_named(engine: Any) -> None:
    run = simulate(Weak(), classifier(), clients((6, 9, 8)), 2, executor=engine)
    assert run.metrics[0]["dropped"] == {}
    assert run.metrics[1]["dropped"] == {1: "MemoryError: out of memory"}
    assert run.metrics[1]["trained"] == 2


class Untrainable(nn.Linear):
    """Predicts, and cannot be trained."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("no training here")
        return super().forward(x)


def test_if_nobody_can_train_in_the_first_round_the_run_stops_with_the_reason() -> None:
    problem = NeuralProblem(Untrainable(4, 3), dtype=torch.float64)
    with pytest.raises(ClientError, match=r"client 0 failed in training of round 1: .*no train"):
        simulate(FedAvg(), problem, clients((6, 9)), 2)


def test_data_are_read_in_the_dtype_of_the_parameters() -> None:
    run = simulate(
        FedAvg(local_steps=1), classifier(torch.float64), clients(dtype=torch.float32), 1
    )
    assert all(value.dtype == torch.float64 for value in run.server.values())


def test_if_nobody_is_left_in_a_later_round_the_server_state_stays() -> None:
    method, problem, data = (
        FedAvg(lr=0.1, local_steps=2, batch_size=4),
        classifier(),
        clients((6, 9)),
    )

    def sabotage(_: RoundEnd) -> None:
        data.x.fill_(torch.nan)  # type: ignore[union-attr]  # a tensor

    run = simulate(method, problem, data, 2, evaluate_every=0, callbacks=[sabotage])
    assert sorted(run.metrics[1]["dropped"]) == [0, 1]
    assert run.metrics[1]["trained"] == 0
    first = simulate(method, problem, clients((6, 9)), 1, evaluate_every=0)
    assert tree.same(run.server, first.server)


# ---------------------------------------------------------------------- who trains, who uploads
@final
@dataclass(frozen=True)
class AllTrain(GatherAlgorithm[Problem, Params, Params, Params, Params]):
    """All clients count their rounds; the server keeps the sum of what the cohort sends."""

    def everyone_trains(self) -> bool:
        return True

    cites: ClassVar[str] = "A toy"

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start at nothing, with room for every client."""
        return {"seen": torch.zeros(len(clients))}

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Tell each client its own number."""
        return {"id": torch.tensor(float(client.id))}

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read nothing."""
        return DataRequest()

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Start counting."""
        return {"rounds": torch.zeros(())}

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Count on."""
        return ClientUpdate(
            {"rounds": state["rounds"] + 1}, {"id": received["id"]}, {"id": received["id"]}
        )

    def personalize(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Judge nothing in particular."""
        return Model(problem, problem.init(Key(0)))

    def aggregate(
        self, problem: Problem, server: Params, uploads: Sequence[ClientUpload[Params]], key: Key
    ) -> Params:
        """Mark who has arrived, and check the order."""
        ids = [received.client.id for received in uploads]
        assert ids == sorted(ids)
        assert [float(r.value["id"]) for r in uploads] == ids
        seen = server["seen"].clone()
        seen[ids] += 1
        return {"seen": seen}


@pytest.mark.parametrize("engine", ENGINES)
def test_everyone_trains_and_only_the_cohort_uploads(engine: Any) -> None:
    run = simulate(
        AllTrain(), classifier(), clients((4,) * 6), 5, participation=0.5, executor=engine,
        evaluate_every=0,
    )  # fmt: skip
    assert all(record["trained"] == 6 and record["cohort"] == 3 for record in run.metrics)
    assert [float(state["rounds"]) for _, state in run.pool.store] == [5.0] * 6
    assert float(run.server["seen"].sum()) == 15
    assert float(run.server["seen"].max()) < 6
    upload = wire.size({"id": torch.tensor(5.0)})
    assert all(r["bytes_up"] <= 3 * upload < r["bytes_down"] for r in run.metrics)


def test_messages_differ_by_client_and_info_is_averaged_over_uploads() -> None:
    run = simulate(AllTrain(), classifier(), clients((2, 6)), 1, evaluate_every=0)
    assert run.metrics[0]["metrics"]["id"] == pytest.approx(6 / 8)  # weighted by rows


def test_only_the_cohort_trains_otherwise() -> None:
    run = simulate(
        Ditto(local_steps=1, batch_size=4), classifier(), clients((4,) * 6), 1, participation=0.34
    )
    assert run.metrics[0]["trained"] == 2
    assert len(run.pool.store) == 2


@pytest.mark.bits
def test_windows_do_not_change_a_bit() -> None:
    method, problem, data = (
        Ditto(lr=0.1, local_steps=2, batch_size=4),
        classifier(),
        clients((6, 9, 8, 7, 5)),
    )
    whole = simulate(method, problem, data, 2, executor="loop")
    program = ClientProgram(method, problem)
    pool = LocalPool(program, data, window=2)
    cut = Training(method, problem, pool).run(2)
    assert tree.same(cut.server, whole.server)
    cut_states = {str(i): state for i, state in pool.store}
    assert tree.same(cut_states, {str(i): state for i, state in whole.pool.store})


# ---------------------------------------------------------------------- absent leaves
@final
@dataclass(frozen=True)
class Halves(Averaging[Problem, None]):
    """Even clients send one layer, odd ones the other, and the first bias is nobody's."""

    cites: ClassVar[str] = "A toy"

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read nothing."""
        return DataRequest()

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send one layer."""
        layer = "0.weight" if client.id % 2 == 0 else "2.weight"
        return {layer: server[layer]}

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Add the number of steps, which is one."""
        return ClientUpdate(None, {name: value + 1 for name, value in received.items()})

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Judge the initial model."""
        return Model(problem, problem.init(Key(0)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_leaf_is_averaged_over_those_who_sent_it_and_kept_if_nobody_did(engine: Any) -> None:
    problem = classifier()
    run = simulate(Halves(), problem, clients((4, 6, 9)), 1, executor=engine, evaluate_every=0)
    start = problem.init(Key(0))
    assert difference(run.server["0.weight"], start["0.weight"] + 1) < 1e-14
    assert difference(run.server["2.weight"], start["2.weight"] + 1) < 1e-14
    assert tree.same(run.server["0.bias"], start["0.bias"])


# ---------------------------------------------------------------------- bytes, seconds, precision
def test_bytes_are_those_of_the_encoded_messages() -> None:
    problem, data = classifier(), clients((6, 9, 8))
    run = simulate(FedAvg(lr=0.1, local_steps=2, batch_size=4), problem, data, 1)
    sent = len(wire.encode(problem.init(Key(0))))
    assert run.bytes_down == 3 * sent
    assert run.bytes_up == 3 * sent  # nothing in it is zero: dense, the same shapes
    numbers = sum(value.numel() for value in problem.init(Key(0)).values())
    record = run.metrics[0]
    assert record["dense_up"] == record["dense_down"] == 3 * 8 * numbers
    assert record["entropy_down"] == 3 * math.ceil(wire.entropy_size(problem.init(Key(0))))
    assert record["entropy_up"] <= record["bytes_up"]


def test_nothing_sent_costs_nothing() -> None:
    network = NetworkModel(latency=1.0, up=1.0, down=1.0)
    run = simulate(
        LocalOnly(local_steps=1, batch_size=4), classifier(), clients(), 2, network=network
    )
    assert run.bytes_up == run.bytes_down == 0
    assert [record["simulated_seconds"] for record in run.metrics] == [0.0, 0.0]


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    profiles = [{"flops_per_second": 1e6}, {"flops_per_second": 1e3}, {}]
    network = NetworkModel(latency=0.5, up=1000.0, down=4000.0)
    run = simulate(
        FedAvg(local_steps=2, batch_size=4), classifier(), clients((6, 6, 6), profiles=profiles), 1,
        network=network,
    )  # fmt: skip
    record = run.metrics[0]
    flops, up, down = (record[name] // 3 for name in ("flops", "bytes_up", "bytes_down"))
    wanted = 1.0 + up / 1000 + down / 4000 + flops / 1e3
    assert record["simulated_seconds"] == pytest.approx(wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_with_lossy_messages_everybody_goes_on_with_what_arrived(
    engine: Any, precision: Any
) -> None:
    """The server averages decoded uploads, and clients start from decoded models."""
    method, problem, data = (
        FedAvg(lr=0.1, local_steps=0, weighting="uniform"),
        classifier(),
        clients(),
    )
    run = simulate(method, problem, data, 1, executor=engine, precision=precision)
    start = problem.init(Key(0))
    # without local steps the upload is the decoded downlink, coded once more
    once = wire.as_received(start, precision)
    twice = wire.as_received(once, precision)
    assert difference(run.server, twice) < 1e-14
    assert difference(run.server, start) > 1e-4
    exact = simulate(method, problem, data, 1)
    assert run.bytes_up < 0.5 * exact.bytes_up


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_upload_is_beyond_the_precision_is_dropped_and_named(engine: Any) -> None:
    method, problem, data = (
        Ditto(lr=0.1, local_steps=2, batch_size=4),
        classifier(),
        clients((6, 9, 8)),
    )
    x = data.x.clone()  # type: ignore[union-attr]  # a tensor
    x[data.train[1]] *= 1e9
    broken = simulate(method, problem, replace(data, x=x), 1, executor=engine, precision="float16")
    told = broken.metrics[0]["dropped"]
    assert list(told) == [1]
    assert re.match(r"upload \d\.\w+: a value is beyond 65504, the largest of float16", told[1])
    exact = simulate(method, problem, replace(data, x=x), 1, executor=engine)
    assert exact.metrics[0]["dropped"] == {}
    # it kept no state of its own: it begins where everybody is
    assert tree.same(broken.personal(1).params, wire.as_received(broken.server, "float16"))


def test_with_lossy_messages_clients_are_judged_on_what_they_receive() -> None:
    method, problem, data = FedAvg(lr=0.1, local_steps=2, batch_size=4), classifier(), clients()
    run = simulate(method, problem, data, 1, precision="int8")
    assert difference(wire.as_received(run.server, "int8"), run.server) > 1e-4
    assert tree.same(run.personal(0).params, wire.as_received(run.server, "int8"))
    assert tree.same(run.model.params, run.server)


def test_cohorts_follow_the_seed_alone() -> None:
    method, problem, data = AllTrain(), classifier(), clients((4,) * 6)
    seen = [
        simulate(method, problem, data, 3, participation=0.5, seed=seed, evaluate_every=0).server
        for seed in (0, 0, 1)
    ]
    assert tree.same(seen[0], seen[1])
    assert not np.array_equal(seen[0]["seen"].numpy(), seen[2]["seen"].numpy())
