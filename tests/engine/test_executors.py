"""Clients compute on the device of their pool; everything else stays on the CPU.

The device of these tests is `meta`, which every machine has. It rejects operations that mix it with
the CPU, and it has shapes but no values.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given as given_values
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from tests.support.fixtures import classifier, clients
from torch import Tensor, nn

import parsifl
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import registry, tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import Batches, BatchSpec, ClientRoundData, DataRequest
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.core.tree import Opaque
from parsifl.engine import executors, threads
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.executors import CPU, Task, check_device, choose_executor, placed
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram, ClientRequest, ClientResult
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.testing.conformance import harness_for, small
from parsifl.testing.conformance.examples import restricted
from parsifl.testing.conformance.harness import difference, snapshot

EXECUTORS: tuple[Literal["vmap", "fused"], ...] = ("vmap", "fused")


def tasks(*arguments: tuple[Any, ...]) -> list[Task]:
    return [Task(client, given) for client, given in enumerate(arguments)]


def same(left: dict[int, Any], right: dict[int, Any]) -> bool:
    return left.keys() == right.keys() and all(tree.same(left[i], right[i]) for i in left)


def shards(problem: Problem, sizes: tuple[int, ...], work: DataRequest) -> list[Any]:
    maker = BatchSampler(clients(sizes), problem)
    return [maker.draw(client, work, Key(1)) for client in range(len(sizes))]


@pytest.mark.parametrize("executor", ["loop", "threads", "vmap"])
def test_results_belong_to_their_clients(executor: Any) -> None:
    given = tasks(*((torch.tensor(float(i)),) for i in range(5)))
    outcome = executors.run(lambda x: 2 * x, given, executor, 3)
    assert [float(outcome.results[i]) for i in range(5)] == [0, 2, 4, 6, 8]
    assert not outcome.failures
    assert not outcome.fallbacks


@pytest.mark.parametrize("executor", ["loop", "threads", "vmap"])
def test_results_are_handed_over_as_they_come(executor: Any) -> None:
    given = tasks(*((torch.tensor(float(i)),) for i in range(5)))
    jobs = executors.jobs(lambda x: 2 * x, given, executor, 3)
    parts = [outcome.results for outcome in executors.imap(jobs, executor)]
    assert [i for part in parts for i in part] == [0, 1, 2, 3, 4]
    assert len(parts) == (2 if executor == "vmap" else 5)


@pytest.mark.bits
@pytest.mark.parametrize("count", [1, 2, 3])
def test_clients_in_threads_have_the_bits_of_a_loop_on_one_core(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 4)
    problem, work = classifier(), DataRequest({"train": BatchSpec(4, steps=3)})
    given = [Task(i, (shard,)) for i, shard in enumerate(shards(problem, (5, 9, 8, 4), work))]
    start = problem.init(Key(2))

    def local(shard: ClientRoundData) -> Any:
        return sgd(problem, start, shard["train"], SgdConfig(0.1)), torch.tensor(
            torch.get_num_threads()
        )

    with threads.single_threaded():
        loop = executors.run(local, given, "loop", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        found = executors.run(local, given, "threads", 10)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert same(found.results, loop.results)
    assert found.blocks == loop.blocks == [[0], [1], [2], [3]]


def test_a_client_that_raises_in_a_thread_is_named() -> None:
    def picky(x: Tensor) -> Tensor:
        if float(x) in (1.0, 2.0):
            raise ValueError("not this one")
        return x

    given = tasks(*((torch.tensor(float(i)),) for i in range(4)))
    outcome = executors.run(picky, given, "threads", 10)
    assert outcome.failures == {1: "ValueError: not this one", 2: "ValueError: not this one"}
    assert sorted(outcome.results) == [0, 3]


@pytest.mark.bits
def test_a_convolutional_run_gives_the_bits_of_the_loop() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 3)
        )

    problem, data = NeuralProblem(build, dtype=torch.float64), clients()
    method = Ditto(lr=0.1, local_steps=2, batch_size=4)
    auto, loop = (simulate(method, problem, data, 2, executor=e) for e in ("auto", "loop"))
    assert auto.metrics[-1]["executor"] == "threads"
    assert tree.same(snapshot(auto), snapshot(loop))
    assert auto.metrics[-1]["personal"] == loop.metrics[-1]["personal"]


def test_groups_are_derived_from_structure_shape_and_dtype() -> None:
    given = tasks(
        ({"a": torch.zeros(2)},),
        ({"a": torch.zeros(3)},),
        ({"a": torch.ones(2)},),
        ({"b": torch.zeros(2)},),
        ({"a": torch.zeros(2, dtype=torch.float64)},),
        ({"a": (torch.zeros(2), 1)},),
        ({"a": (torch.zeros(2), 1)},),
        ({"a": (torch.zeros(2), 2)},),
    )
    outcome = executors.run(lambda x: tree.leaves(x)[0] + 1, given, "vmap", 10)
    assert sorted(map(sorted, outcome.blocks)) == [[0, 2], [1], [3], [4], [5, 6], [7]]
    assert len(outcome.results) == 8


def test_what_is_padded_is_taken_apart_in_the_order_of_trees() -> None:
    (shard,) = shards(classifier(), (5,), DataRequest({"train": BatchSpec(4, steps=3)}, rows=True))
    for part in (shard["train"], shard.rows):
        assert tuple(tree.names(tree.structure(part))) == executors._TENSORS[type(part)]


@pytest.mark.parametrize(
    ("clients", "sizes"),
    [(1, [1]), (10, [10]), (11, [5, 6]), (20, [10, 10]), (41, [6, 7, 7, 7, 7, 7])],
)
def test_blocks_are_of_nearly_equal_size_and_even_in_number(clients: int, sizes: list[int]) -> None:
    given = tasks(*((torch.zeros(1),) for _ in range(clients)))
    outcome = executors.run(lambda x: x, given, "vmap", 10)
    assert [len(members) for members in outcome.blocks] == sizes
    assert sorted(i for members in outcome.blocks for i in members) == list(range(clients))


@given_values(st.integers(1, 60), st.integers(3, 12))
def test_no_block_is_too_large_and_nobody_is_left_alone(clients: int, largest: int) -> None:
    given = tasks(*((torch.zeros(1),) for _ in range(clients)))
    outcome = executors.run(lambda x: x, given, "vmap", largest)
    found = [len(members) for members in outcome.blocks]
    assert sum(found) == clients
    assert max(found) <= largest
    assert min(found) > 1 or clients == 1


def test_batches_that_are_wholly_finite_are_known_to_be() -> None:
    values = [1.0, 2.0, float("nan"), 3.0, float("inf"), 4.0]
    given = tasks(*((torch.tensor(value), i) for i, value in enumerate(values)))
    assert executors.run(lambda x, _: x, given, "loop", 3).ordinary == set()
    pairs = tasks(*((torch.tensor(value),) for value in values))
    found = executors.run(lambda x: {"x": x + 1, "n": x.isnan()}, pairs, "vmap", 3)
    assert found.blocks == [[0, 1, 2], [3, 4, 5]]
    assert found.ordinary == set()
    pairs = tasks(*((torch.tensor(value),) for value in (1.0, 2.0, 3.0, float("nan"), 0.0, 4.0)))
    assert executors.run(lambda x: x + 1, pairs, "vmap", 3).ordinary == {0, 1, 2}


def test_the_loop_takes_clients_one_by_one() -> None:
    given = tasks(*((torch.zeros(1),) for _ in range(7)))
    assert executors.run(lambda x: x, given, "loop", 3).blocks == [[i] for i in range(7)]


@pytest.mark.bits
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_number_of_threads_changes_no_bit(executor: Any, monkeypatch: Any) -> None:
    problem = classifier(torch.float32)
    drawn = shards(
        problem, tuple(range(5, 28)), DataRequest({"train": BatchSpec(batch_size=4, epochs=2)})
    )
    start = problem.init(Key(0))
    given = tasks(*((start, shard) for shard in drawn))

    def local(down: Any, shard: Any) -> Any:
        trained = sgd(problem, down, shard["train"], SgdConfig(0.3, 0.5))
        batch = shard["train"].batch(0)
        return trained, problem.loss(trained, batch)  # runs the module itself

    before = torch.get_num_threads()
    found = []
    monkeypatch.setattr(threads, "cores", lambda: 4)
    try:
        for count in (1, 2, 4, 2):
            torch.set_num_threads(count)
            found.append(executors.run(local, given, executor, 6))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert not any(outcome.failures or outcome.fallbacks for outcome in found)
    assert all(same(outcome.results, found[0].results) for outcome in found[1:])


def test_what_is_no_strided_tensor_runs_alone() -> None:
    class Matrix(Opaque):
        pass

    given = tasks((Matrix(), torch.ones(1)), (Matrix(), torch.ones(1)))
    outcome = executors.run(lambda _, x: x + 1, given, "vmap", 10)
    assert outcome.blocks == [[0], [1]]
    sparse = tasks((torch.eye(2).to_sparse(),), (torch.eye(2).to_sparse(),))
    assert executors.run(lambda x: x.to_dense(), sparse, "vmap", 10).blocks == [[0], [1]]


def test_a_leaf_that_all_share_is_not_copied() -> None:
    shared = torch.ones(3)
    seen: list[Tensor] = []

    def look(common: Tensor, own: Tensor) -> Tensor:
        seen.append(common)
        return common * own

    given = tasks(*((shared, torch.tensor(float(i))) for i in range(3)))
    outcome = executors.run(look, given, "vmap", 10)
    assert seen[0] is shared
    assert outcome.results[2].tolist() == [2, 2, 2]


def test_clients_that_share_everything_need_no_batch() -> None:
    shared = torch.ones(2)
    outcome = executors.run(lambda x: x + 1, tasks((shared,), (shared,)), "vmap", 10)
    assert [r.tolist() for r in outcome.results.values()] == [[2, 2], [2, 2]]


def test_an_output_that_does_not_depend_on_the_client_is_given_to_all() -> None:
    given = tasks((torch.zeros(1),), (torch.ones(1),))
    outcome = executors.run(lambda _: {"c": torch.ones(2), "n": 3}, given, "vmap", 10)
    assert outcome.results[1]["c"].tolist() == [1, 1]
    assert outcome.results[1]["n"] == 3


def test_a_batch_that_raises_is_run_one_by_one_and_the_culprit_named() -> None:
    def picky(x: Tensor) -> Tensor:
        if float(x) == 1:
            raise ValueError("I do not like ones\nsecond line")
        return x

    given = tasks(*((torch.tensor(float(i)),) for i in range(3)))
    outcome = executors.run(picky, given, "vmap", 10)
    assert outcome.failures == {1: "ValueError: I do not like ones"}
    assert sorted(outcome.results) == [0, 2]
    assert not outcome.fallbacks


def test_a_rerun_in_which_nobody_raises_is_a_fallback() -> None:
    outcome = executors.run(
        lambda x: x * x.item(), tasks((torch.ones(()),), (torch.zeros(()),)), "vmap", 10
    )
    assert len(outcome.fallbacks) == 1
    assert "RuntimeError" in outcome.fallbacks[0]
    assert sorted(outcome.results) == [0, 1]


def test_an_exception_without_text_is_named_by_its_class() -> None:
    def fail(_: Tensor) -> Tensor:
        raise KeyError

    outcome = executors.run(fail, tasks((torch.ones(1),)), "loop", 1)
    assert outcome.failures == {0: "KeyError"}


def test_randomness_that_is_not_keyed_cannot_hide_in_a_batch() -> None:
    given = tasks((torch.ones(1),), (torch.zeros(1),))
    before = torch.get_rng_state()
    outcome = executors.run(lambda x: x + torch.rand(1), given, "vmap", 10)
    assert outcome.fallbacks
    torch.set_rng_state(before)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unequal_steps_and_rows_are_padded_exactly(executor: Any, momentum: float) -> None:
    problem = classifier()
    work = DataRequest({"train": BatchSpec(batch_size=4, epochs=2)})
    drawn = shards(problem, (3, 4, 9, 17, 6), work)
    assert len({len(shard["train"]) for shard in drawn}) > 2
    start = problem.init(Key(0))

    def local(down: Any, shard: Any) -> Any:
        return sgd(problem, down, shard["train"], SgdConfig(0.3, momentum, 0.01))

    given = tasks(*((start, shard) for shard in drawn))
    one_by_one = executors.run(local, given, "loop", 10)
    batched = executors.run(local, given, executor, 10)
    assert not batched.fallbacks
    assert batched.blocks == [[3, 2, 4, 0, 1]]  # longest first, then by id
    assert difference(batched.results, one_by_one.results) < 1e-13


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_client_without_steps_stays_as_it_is_in_a_batch(executor: Any) -> None:
    problem = classifier()
    maker = BatchSampler(clients((6, 8)), problem)
    drawn = [
        maker.draw(i, DataRequest({"train": BatchSpec(4, steps=2 * i)}), Key(1)) for i in range(2)
    ]
    start = problem.init(Key(0))
    given = tasks(*((start, shard) for shard in drawn))
    outcome = executors.run(
        lambda down, shard: sgd(problem, down, shard["train"], SgdConfig(0.3, 0.5)),
        given,
        executor,
        9,
    )
    assert not outcome.fallbacks
    assert tree.same(outcome.results[0], start)
    assert not tree.same(outcome.results[1], start)


def test_full_batches_of_unequal_size_are_padded_exactly() -> None:
    problem = restricted(classifier(), ())
    drawn = shards(problem, (3, 7, 5), DataRequest({"train": BatchSpec(None, steps=3)}))
    start = problem.init(Key(0))
    given = tasks(*((start, shard) for shard in drawn))

    def local(down: Any, shard: Any) -> Any:
        return sgd(problem, down, shard["train"], SgdConfig(0.3))

    loop = executors.run(local, given, "loop", 9)
    batched = executors.run(local, given, "vmap", 9)
    assert len(batched.blocks) == 1
    assert difference(batched.results, loop.results) < 1e-13


def test_padding_reads_no_rows_of_other_clients() -> None:
    """Row 0 belongs to a client with bad data: 0 * NaN would spread to all who are padded."""
    problem = restricted(classifier(), ())
    data = clients((3, 7, 5))
    assert isinstance(data.x, Tensor)
    data.x[data.train[0]] = torch.nan
    maker, start = BatchSampler(data, problem), problem.init(Key(0))
    work = DataRequest({"train": BatchSpec(None, steps=2)})
    given = tasks(*((start, maker.draw(client, work, Key(1))) for client in range(3)))

    def local(down: Any, shard: Any) -> Any:
        return sgd(problem, down, shard["train"], SgdConfig(0.3))

    loop, batched = (executors.run(local, given, e, 9) for e in ("loop", "vmap"))
    assert len(batched.blocks) == 1
    for client in (1, 2):
        assert difference(batched.results[client], loop.results[client]) < 1e-13
    assert not tree.is_finite(batched.results[0])


def test_batches_whose_rows_may_not_be_padded_are_kept_apart() -> None:
    problem = classifier()
    drawn = shards(problem, (3, 7, 7), DataRequest({"train": BatchSpec(None, steps=1)}))
    fixed = [replace(s, batches={"train": replace(s["train"], fixed=True)}) for s in drawn]
    given = tasks(*((shard,) for shard in fixed))
    outcome = executors.run(lambda shard: shard["train"].weight.sum(), given, "vmap", 9)
    assert sorted(outcome.blocks) == [[0], [1, 2]]


def test_all_rows_are_padded_with_weight_zero() -> None:
    problem = classifier()
    drawn = shards(problem, (3, 7, 5), DataRequest(rows=True))
    given = tasks(*((shard,) for shard in drawn))

    def total(shard: ClientRoundData) -> Tensor:
        rows = shard.all_rows()
        total: Tensor = (rows.x * rows.weight[:, None]).sum(0) / rows.weight.sum()
        return total

    batched = executors.run(total, given, "vmap", 9)
    assert len(batched.blocks) == 1
    for client, shard in enumerate(drawn):
        wanted = shard.all_rows().x.mean(0)
        assert torch.allclose(batched.results[client], wanted, rtol=1e-14, atol=1e-14)


def test_other_pooled_data_make_another_group() -> None:
    problem = classifier()
    first, second = (
        shards(problem, (4, 4), DataRequest({"t": BatchSpec(2, steps=1)})) for _ in range(2)
    )
    given = tasks(*((shard,) for shard in (first[0], second[0], first[1], second[1])))

    def rows(shard: Any) -> Any:
        batches: Batches = shard["t"]
        return batches.batch(0).x

    blocks = executors.run(rows, given, "vmap", 9).blocks
    assert blocks == [[0, 2], [1, 3]]


def test_the_executor_follows_engine_and_problem() -> None:
    mlp = classifier()
    layers = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)]
    shallow = NeuralProblem(nn.Sequential(*layers[:2], nn.Flatten(), nn.Linear(16, 3)))
    deep = NeuralProblem(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)))
    other = restricted(mlp, ())
    chosen = {
        (engine, name): choose_executor(engine, problem)[0]
        for engine in ("auto", "loop", "fused")
        for name, problem in (("mlp", mlp), ("shallow", shallow), ("deep", deep), ("other", other))
    }
    assert {chosen["loop", name] for name in ("mlp", "deep", "other")} == {"loop"}
    assert chosen["auto", "mlp"] == chosen["fused", "mlp"] == "fused"
    assert chosen["auto", "other"] == chosen["fused", "other"] == "vmap"
    assert chosen["auto", "shallow"] == "fused"
    assert chosen["auto", "deep"] == "threads"  # many batched convolutions are slower
    blocks = [choose_executor("auto", problem)[1] for problem in (mlp, shallow, other)]
    assert blocks == [20, 10, 10]


@pytest.mark.parametrize("engine", ["auto", "fused"])
def test_clients_with_sparse_rows_train_one_after_the_other(engine: Any) -> None:
    rows = [(csr_matrix(np.eye(6) * (1 + i)), np.arange(6.0)) for i in range(3)]
    dense = [(x.toarray(), y) for x, y in rows]
    method, problem = FedAvg(local_steps=2, batch_size=3), GLM(6)
    sparse = simulate(method, problem, rows, 2, executor=engine)
    assert sparse.metrics[0]["executor"] == "loop"
    batched = simulate(method, problem, dense, 2, executor=engine)
    assert batched.metrics[0]["executor"] == "vmap"
    torch.testing.assert_close(sparse.model.params, batched.model.params)


class Recurrent(nn.Module):
    """Reads four features one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.memory(x[:, :, None])[0]
        return states[:, -1]


@pytest.mark.parametrize(("engine", "executor"), [("auto", "threads"), ("fused", "vmap")])
def test_recurrent_layers_run_without_advice_of_torch(engine: Any, executor: str) -> None:
    problem = NeuralProblem(Recurrent, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = simulate(FedAvg(local_steps=2), problem, clients(), 1, executor=engine)
    assert run.metrics[0]["executor"] == executor
    assert not run.metrics[0]["notes"]
    assert not told


def test_a_problem_that_cannot_be_batched_runs_in_the_loop() -> None:
    class Alone:
        supports_vmap = False

    problem: Any = Alone()
    assert choose_executor("fused", problem)[0] == "loop"


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="should be 'auto', 'loop'"):
        simulate(FedAvg(), classifier(), clients(), 1, executor="bached")  # type: ignore[arg-type]  # a user's mistake


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
    with pytest.raises(ConfigError, match="requires the CPU: use 'vmap' or 'loop'"):
        choose_executor("fused", classifier(), cpu=False)
