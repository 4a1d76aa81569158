"""The small parts of the engine: sampling, shards, store, choice, network, operations counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from torch import nn

from parsifl import tree
from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.engine import sampling
from parsifl.engine.choice import choose_executor
from parsifl.engine.network import Network
from parsifl.engine.shards import Infos, Shards
from parsifl.engine.simulate import simulate
from parsifl.engine.store import ClientStore
from parsifl.errors import CapabilityError, ConfigError, DataError
from parsifl.keys import Key
from parsifl.problem import Params, Problem
from parsifl.problems.neural import NeuralProblem
from parsifl.testing.conformance.examples import restricted
from parsifl.testing.toys import Toy, classifier, clients
from parsifl.work import Draw, Shard, Work


# ---------------------------------------------------------------------- sampling
@given(st.integers(1, 200), st.floats(0.001, 1.0), st.integers(0, 99))
def test_a_cohort_is_ascending_without_repetition_and_of_the_right_size(
    count: int, participation: float, seed: int
) -> None:
    cohort = sampling.choose(count, participation, Key(seed))
    assert cohort == sorted(set(cohort))
    assert len(cohort) == max(1, round(count * participation))
    assert cohort[0] >= 0
    assert cohort[-1] < count
    assert cohort == sampling.choose(count, participation, Key(seed))


def test_every_client_is_drawn_about_equally_often() -> None:
    counts = np.zeros(10)
    for number in range(2000):
        counts[sampling.choose(10, 0.3, Key(0).at(round=number))] += 1
    assert np.abs(counts / 2000 - 0.3).max() < 0.05


@pytest.mark.parametrize("participation", [0.0, -0.1, 1.01, float("nan")])
def test_an_impossible_participation_is_refused(participation: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        sampling.choose(5, participation, Key(0))


# ---------------------------------------------------------------------- shards
def test_infos_are_made_on_demand() -> None:
    infos = Infos(clients((6, 9), profiles=[{"width": 0.5}, {}]))
    assert len(infos) == 2
    assert infos[0] == ClientInfo(0, 6, {"width": 0.5})
    assert list(infos) == list(infos[0:2]) == [infos[0], infos[1]]


def test_a_shard_reads_training_rows_only_and_follows_its_key() -> None:
    data, work = clients((6, 9)), Work({"a": Draw(4, steps=5), "b": Draw(4, steps=5)}, rows=True)
    shards = Shards(data, classifier())
    first, same = (shards.shard(1, work, Key(3, round=2)) for _ in range(2))
    assert tree.same(first, same)
    assert set(first["a"].index.flatten().tolist()) <= set(data.train[1].tolist())
    assert not torch.equal(first["a"].index, first["b"].index)
    assert torch.equal(first.all_rows().x, torch.as_tensor(data.x)[data.train[1]])
    assert first.round == 2
    for other in (Key(4, round=2), Key(3, round=1)):
        assert not torch.equal(shards.shard(1, work, other)["a"].index, first["a"].index)


def test_all_rows_must_be_asked_for() -> None:
    shard = Shards(clients(), classifier()).shard(0, Work(), Key(0))
    with pytest.raises(ConfigError, match="rows=True"):
        shard.all_rows()


def test_a_client_without_training_rows_is_named() -> None:
    data = clients((6, 9))
    empty = replace(data, train=[data.train[0], data.train[1][:0]])
    with pytest.raises(DataError, match="client 1 has no training rows"):
        simulate(FedAvg(), classifier(), empty, 1)


def test_integer_features_stay_integers() -> None:
    data = replace(clients(), x=torch.arange(46 * 4).reshape(46, 4)[: len(clients().y)])
    shard = Shards(data, classifier()).shard(0, Work({"t": Draw(2, steps=1)}), Key(0))
    assert shard["t"].batch(0).x.dtype == torch.int64
    assert shard["t"].weight.dtype == torch.float64


def test_a_csr_matrix_is_read_row_by_row() -> None:
    dense = np.eye(12)[:, :4]
    data = replace(clients((3, 3), test=3), x=csr_matrix(dense))
    rows = Shards(data, classifier()).rows(np.array([2, 0]))
    assert np.array_equal(rows.x.matrix.toarray(), dense[[2, 0]])


def batch_norm() -> NeuralProblem:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return NeuralProblem(nn.Sequential(norm, nn.Linear(4, 3)), dtype=torch.float64)


def test_padding_is_refused_where_rows_interact() -> None:
    with pytest.raises(CapabilityError, match="set partial to 'wrap' or 'drop'"):
        simulate(FedAvg(batch=4, steps=1), batch_norm(), clients((6, 9)), 1)


@pytest.mark.parametrize("partial", ["wrap", "drop"])
def test_whole_batches_are_fine_where_rows_interact(partial: Any) -> None:
    method = FedAvg(batch=4, steps=2, partial=partial)
    run = simulate(method, batch_norm(), clients((6, 9)), 1)
    assert not run.metrics[0]["dropped"]


# ---------------------------------------------------------------------- store
def test_states_are_copies_of_their_own_contiguous_memory() -> None:
    store = ClientStore()
    whole = torch.arange(6.0).reshape(2, 3)
    store.save(3, {"t": whole.t(), "first": whole[0]})
    whole += 1
    state = store.load(3, lambda: None)
    assert state["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert state["t"].is_contiguous()
    assert state["first"].untyped_storage().nbytes() == 12
    assert len(store) == 1


def test_a_first_state_is_made_and_not_kept() -> None:
    store = ClientStore()
    assert store.load(1, lambda: "made") == "made"
    assert len(store) == 0
    store.restore({7: None, 2: None})
    assert [client for client, _ in store] == [2, 7]


# ---------------------------------------------------------------------- choice
def test_the_executor_follows_engine_and_problem() -> None:
    mlp = classifier()
    picture = NeuralProblem(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
    other = restricted(mlp, ())
    chosen = {
        (engine, name): choose_executor(engine, problem)[0]
        for engine in ("auto", "sequential", "batched")
        for name, problem in (("mlp", mlp), ("conv", picture), ("other", other))
    }
    assert {chosen["sequential", name] for name in ("mlp", "conv", "other")} == {"loop"}
    assert chosen["auto", "mlp"] == chosen["batched", "mlp"] == "fused"
    assert chosen["auto", "other"] == chosen["batched", "other"] == "vmap"
    assert chosen["auto", "conv"] == "loop"


def test_a_problem_that_cannot_be_batched_runs_in_the_loop() -> None:
    class Alone:
        batchable = False

    problem: Any = Alone()
    assert choose_executor("batched", problem)[0] == "loop"


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batched'"):
        simulate(FedAvg(), classifier(), clients(), 1, engine="bached")  # type: ignore[arg-type]  # a user's mistake


# ---------------------------------------------------------------------- network
def test_seconds_add_latency_transfer_and_computing() -> None:
    network = Network(latency=0.15, up=100.0, down=1000.0)
    device = {"flops_per_second": 1e6}
    assert network.seconds(200, 500, 3_000_000, device) == pytest.approx(0.3 + 2 + 0.5 + 3)
    assert network.seconds(0, 500, None, device) == pytest.approx(0.15 + 0.5)
    assert network.seconds(0, 0, 3_000_000, {}) == 0.0
    assert Network().seconds(10**9, 10**9, None, {}) == 0.0


@pytest.mark.parametrize("setting", [{"up": 0.0}, {"down": -1.0}, {"latency": -0.1}])
def test_an_impossible_network_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"Network\."):
        Network(**setting)


# ---------------------------------------------------------------------- operations
def per_step(batch: int) -> int:
    """4-5-3: forward and weight gradients of both layers, input gradient of the second."""
    first, second = 4 * 5, 5 * 3
    return 2 * batch * (2 * first + 3 * second)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_operations_agree_with_a_count_by_hand(engine: Any) -> None:
    profiles: Sequence[dict[str, int]] = [{"steps": 0}, {}, {"steps": 5}]
    data = clients((6, 9, 8), profiles=profiles)
    run = simulate(FedAvg(batch=4, steps=3), classifier(), data, 1, engine=engine)
    assert run.metrics[0]["flops"] == (0 + 3 + 5) * per_step(4)


def test_both_models_of_ditto_are_counted() -> None:
    method = Ditto(batch=3, steps=2, personal_epochs=1.0)
    run = simulate(method, classifier(), clients((6, 9)), 1)
    assert run.metrics[0]["flops"] == (2 * 2 + 2 + 3) * per_step(3)


@final
@dataclass(frozen=True)
class ReadsValues(Toy):
    """Look at a value, so that work without data is impossible."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Branch on the first weight."""
        assert float(next(iter(down.values())).sum()) < 1e9
        return super().local(problem, down, client, shard)


def test_work_that_needs_values_is_not_counted() -> None:
    run = simulate(ReadsValues(), classifier(), clients((6, 9)), 1, engine="sequential")
    assert run.metrics[0]["flops"] is None
    assert run.metrics[0]["trained"] == 2


# ---------------------------------------------------------------------- run
def test_a_client_that_does_not_exist_is_refused() -> None:
    run = simulate(FedAvg(steps=1), classifier(), clients((6, 9)), 1, evaluate_every=0)
    for client in (-1, 2):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            run.personal(client)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"evaluate_every": -1}])
def test_impossible_counts_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1"):
        simulate(FedAvg(), classifier(), clients(), **{"rounds": 1, **change})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown precision 'int9'; did you mean 'int8'"):
        simulate(FedAvg(), classifier(), clients(), 1, precision="int9")  # type: ignore[arg-type]  # a user's mistake


def test_own_arrays_and_own_module_are_enough() -> None:
    generator = np.random.default_rng(0)
    own = [(generator.normal(size=(8, 4)), generator.integers(0, 3, 8)) for _ in range(3)]
    run = simulate(FedAvg(lr=0.1, steps=2), NeuralProblem(nn.Linear(4, 3)), own, 2)
    assert run.metrics[-1]["global"]["test"]["accuracy"]["mean"] >= 0
    assert run.bytes_up > 0
    assert run.model.params["weight"].shape == (3, 4)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 5))
def test_the_cohort_does_not_depend_on_the_order_of_calls(order: list[int], seed: int) -> None:
    straight = [sampling.choose(9, 0.5, Key(seed, number)) for number in range(4)]
    shuffled = {number: sampling.choose(9, 0.5, Key(seed, number)) for number in order}
    assert straight == [shuffled[number] for number in range(4)]
