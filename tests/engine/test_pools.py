"""The loop drives any pool: a third one, pools around pools, late scores, sums of workers."""

from __future__ import annotations

import json
import random
import time
import types
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fixtures import classifier, clients

from parsifl import wire
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientUpload
from parsifl.core.errors import ConfigError
from parsifl.engine import (
    BatchSampler,
    ClientFailure,
    ClientProgram,
    ClientRequest,
    ClientResult,
    ClientScores,
    DistanceToTruth,
    EarlyStopping,
    Evaluator,
    LocalPool,
    PartialTotal,
    PendingEvaluation,
    RoundEnd,
    RunDir,
    StopTraining,
    Training,
)
from parsifl.engine.settings import Evaluation, RunSettings

SIZES = (6, 9, 8, 11, 7, 5)
ALGORITHMS: dict[str, AnyAlgorithm] = {
    "fedavg": FedAvg(lr=0.1, local_steps=2, batch_size=4),
    "ditto": Ditto(lr=0.1, local_steps=2, batch_size=4),
}


class ThreadedPool:
    """Clients as futures: reordered, delayed, and sometimes lost."""

    executor, deferred_evaluation = "futures", False
    seconds: Mapping[str, float] = types.MappingProxyType({})

    def __init__(self, program: ClientProgram, data: Any, lose: float = 0.0) -> None:
        self.program, self._lose, self._states = program, lose, dict[int, Any]()
        self._sampler = BatchSampler(data, program.problem)
        self._evaluator = Evaluator(program, data, self._sampler, Evaluation())
        self.clients = LocalPool(program, data).clients

    def train(
        self,
        requests: Iterable[ClientRequest],
        evaluation: PendingEvaluation | None = None,  # noqa: ARG002 - a pool that does not defer
    ) -> Generator[Any, None, None]:
        with ThreadPoolExecutor(3) as threads:
            futures = {r.client.id: (r, threads.submit(self._update, r)) for r in requests}
            for number in sorted(futures, reverse=True):
                request, future = futures[number]
                update, down = future.result(), wire.measure(request.message)
                chance = random.Random(f"{request.key.round}/{number}").random()
                if chance < self._lose:
                    yield ClientFailure(request.client, "lost", down)
                    continue
                self._states[number] = update.state
                upload = update.upload if request.upload else None
                up = wire.measure(upload)
                yield ClientResult(
                    request.client, request.message, upload, update.metrics, down, up
                )

    def _load(self, request: ClientRequest) -> tuple[Any, Any]:
        client, seed = request.client, request.key.seed
        if client.id in self._states:
            return request.message, self._states[client.id]
        return request.message, self.program.initial_state(client, request.message, seed)

    def _update(self, request: ClientRequest) -> Any:
        time.sleep(0.001 * (request.client.id % 3))
        wanted = self.program.algorithm.batches(request.client, request.key.round)
        data = self._sampler.draw(request.client.id, wanted, request.key)
        return self.program(*self._load(request), data)

    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        model = self.program.algorithm.model(self.program.problem, server)
        return self._evaluator.scores(list(requests), model, self._load)

    def save(self, directory: Path) -> dict[str, Any]:
        path = directory / "clients" / f"{time.monotonic_ns()}.states"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wire.encode({str(i): state for i, state in self._states.items()}))
        return {"file": path.name}

    def restore(self, directory: Path, saved: dict[str, Any]) -> None:
        kind: Any = types.GenericAlias(dict, (str, self.program.algorithm.tree_types().client))
        states = wire.decode((directory / "clients" / saved["file"]).read_bytes(), kind)
        self._states = {int(i): tree.map(torch.clone, state) for i, state in states.items()}


def training(name: str, pool: Any = LocalPool, **more: Any) -> Training:
    problem, data = classifier(), clients(SIZES, validation=2)
    options = {key: more.pop(key) for key in ("lose",) if key in more}
    program = ClientProgram(ALGORITHMS[name], problem)
    made = pool(program, data, **options) if pool is not LocalPool else LocalPool(program, data)
    chosen = {field.name for field in fields(RunSettings)} & more.keys()
    settings = RunSettings(seed=4, participation=0.7, **{name: more.pop(name) for name in chosen})
    return Training(ALGORITHMS[name], problem, made, settings, **more)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_third_pool_trains_as_the_local_one(name: str) -> None:
    ours, theirs = training(name).run(3), training(name, ThreadedPool).run(3)
    for left, right in zip(tree.leaves(ours.server), tree.leaves(theirs.server), strict=True):
        assert torch.allclose(left, right, rtol=1e-13, atol=1e-15)  # the order of sums differs
    for left, right in zip(ours.records, theirs.records, strict=True):
        assert (left.bytes_up, left.bytes_down) == (right.bytes_up, right.bytes_down)
        one, two = (r.scores["personal"]["test"]["loss"]["mean"] for r in (left, right))
        assert one == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_on_a_third_pool_that_loses_clients_resumes_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    def made(**more: Any) -> Training:
        return training(name, ThreadedPool, lose=0.3, checkpoint_seconds=0.0, **more)

    def stop(event: RoundEnd) -> None:
        if event.record.round == 4:
            raise KeyboardInterrupt

    whole = made().run(6)
    assert any(record.dropped for record in whole.records)
    with pytest.raises(KeyboardInterrupt):
        made(run_dir=RunDir(tmp_path), callbacks=[stop]).run(6)
    resumed = made(run_dir=RunDir(tmp_path)).run(6, resume=True)
    assert tree.same(resumed.server, whole.server)
    assert [r.dropped for r in resumed.records] == [r.dropped for r in whole.records]
    assert [r.scores for r in resumed.records] == [r.scores for r in whole.records]


class LatePool(LocalPool):
    """Scores of a round ride on the next call of `train`."""

    deferred_evaluation = True
    evaluated_alone = 0

    def train(
        self, requests: Iterable[ClientRequest], evaluation: PendingEvaluation | None = None
    ) -> Generator[Any, None, None]:
        if evaluation is not None:
            yield from super().evaluate(evaluation.requests, evaluation.server)
        yield from super().train(requests)

    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        type(self).evaluated_alone += 1
        return super().evaluate(requests, server)


def timeless(record: Any) -> Any:
    return replace(record, seconds={})


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("every", [1, 2])
def test_scores_that_come_a_round_late_are_those_of_their_round(name: str, every: int) -> None:
    LatePool.evaluated_alone = 0
    late = training(name, LatePool, evaluate_every=every).run(5)
    assert LatePool.evaluated_alone == 1  # the last round
    whole = training(name, evaluate_every=every).run(5)
    assert [timeless(r) for r in late.records] == [timeless(r) for r in whole.records]


@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_resumes_at_every_point_of_the_lag(stopped: int, every: int, tmp_path: Path) -> None:
    def made(**more: Any) -> Training:
        return training(
            "ditto", LatePool, evaluate_every=every, checkpoint_seconds=0.0,
            run_dir=RunDir(tmp_path), **more,
        )  # fmt: skip

    def stop(event: RoundEnd) -> None:
        if event.record.round == stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(callbacks=[stop]).run(5)
    resumed = made().run(5, resume=True)
    whole = training("ditto", evaluate_every=every).run(5)
    assert tree.same(resumed.server, whole.server)
    assert [timeless(r) for r in resumed.records] == [timeless(r) for r in whole.records]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_run_that_is_resumed_for_no_more_rounds_gets_its_late_scores(tmp_path: Path) -> None:
    def made(**more: Any) -> Training:
        return training("ditto", LatePool, checkpoint_seconds=0.0, run_dir=RunDir(tmp_path), **more)

    def stop(event: RoundEnd) -> None:
        if event.record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(callbacks=[stop]).run(5)
    resumed, whole = made().run(2, resume=True), training("ditto").run(2)
    assert [timeless(r) for r in resumed.records] == [timeless(r) for r in whole.records]
    again = made().run(4, resume=True)
    assert [r.scores for r in again.records] == [r.scores for r in training("ditto").run(4).records]


class SummingPool(LocalPool):
    """Adds up the uploads where the clients run, as a worker or secure aggregation does."""

    def train(
        self,
        requests: Iterable[ClientRequest],
        evaluation: PendingEvaluation | None = None,  # noqa: ARG002 - a pool that does not defer
    ) -> Generator[Any, None, None]:
        algorithm, problem = self.program.algorithm, self.program.problem
        accumulator, count = algorithm.accumulator(problem), 0
        for answer in super().train(requests):
            assert isinstance(answer, ClientResult)
            weight = algorithm.weight(answer.client)
            accumulator.add(ClientUpload(answer.client, weight, answer.upload))
            count += 1
            yield replace(answer, upload=None, aggregated=True)
        yield PartialTotal(count, accumulator.total())


def test_totals_that_are_summed_by_the_pool_give_the_same_model() -> None:
    ours, theirs = training("fedavg").run(3), training("fedavg", SummingPool).run(3)
    assert tree.same(ours.server, theirs.server)
    assert [timeless(r) for r in ours.records] == [timeless(r) for r in theirs.records]


# ---------------------------------------------------------------------- callbacks
def test_what_a_callback_returns_is_recorded() -> None:
    start = training("fedavg").initial_server()
    state = training("fedavg", callbacks=[DistanceToTruth(start, "moved")]).run(3)
    moved = [record.metrics["moved"] for record in state.records]
    assert 0 < moved[0] < moved[1] < moved[2]


def test_a_truth_may_be_an_array() -> None:
    start = training("fedavg").initial_server()
    arrays = {name: value.numpy() for name, value in start.items()}
    for value in arrays.values():
        value.setflags(write=False)  # as arrays from files are
    by_tensors, by_arrays = (
        training("fedavg", callbacks=[DistanceToTruth(truth)]).run(1).records[0].metrics
        for truth in (start, arrays)
    )
    assert by_arrays["distance"] == pytest.approx(by_tensors["distance"])


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        (
            {"0.weigth": np.zeros((8, 4))},
            r"unknown parameter '0.weigth'; did you mean '0.weight'\?",
        ),
        (
            {"0.bias": np.zeros(3)},
            r"the truth of '0.bias' has shape \(3,\), but the parameter has shape \(5,\)",
        ),
        ({"0.bias": ["a"] * 5}, r"the truth of '0.bias' must be an array or a tensor of numbers"),
        (np.zeros(8), r"truth must map names of parameters to values, .* got ndarray"),
    ],
)
def test_a_truth_that_does_not_fit_the_model_is_rejected_by_name(truth: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^DistanceToTruth: {expected}"):
        training("fedavg", callbacks=[DistanceToTruth(truth)]).run(1)


def test_early_stopping_ends_a_run_that_is_then_finished(tmp_path: Path) -> None:
    callback = EarlyStopping(patience=2, min_delta=10.0, metric="loss")
    made = training("fedavg", callbacks=[callback], run_dir=RunDir(tmp_path))
    state = made.run(20)
    assert len(state.records) == 3  # the first is an improvement, two are not
    assert "has not improved for 2 evaluated rounds" in state.records[-1].stopped
    again = training("fedavg", callbacks=[callback], run_dir=RunDir(tmp_path)).run(20, resume=True)
    assert len(again.records) == 3
    assert again.records[-1].stopped == state.records[-1].stopped


def test_a_callback_that_reads_scores_is_not_kept_waiting_for_them() -> None:
    LatePool.evaluated_alone = 0
    callback = EarlyStopping(patience=2, min_delta=10.0, metric="loss")
    assert len(training("fedavg", LatePool, callbacks=[callback]).run(20).records) == 3
    assert LatePool.evaluated_alone == 3


def test_the_last_round_of_a_stopped_run_is_evaluated() -> None:
    def stop(event: RoundEnd) -> None:
        if event.record.round == 2:
            raise StopTraining("enough")

    for pool in (LocalPool, LatePool):
        state = training("fedavg", pool, callbacks=[stop], evaluate_every=10).run(20)
        assert [bool(record.scores) for record in state.records] == [False, True]
        assert state.records[-1].stopped == "enough"
