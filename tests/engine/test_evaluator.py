from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import ClientError
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine import evaluator, threads
from parsifl.engine.pool import ClientRequest
from parsifl.engine.run import Run
from parsifl.engine.settings import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

SIZES = (3, 1, 17, 40, 2, 9)


def data(shape: tuple[int, ...], *, real: bool = False) -> ClientData:
    """Return clients with test rows of very different numbers, in float32."""
    generator = np.random.default_rng(5)
    pairs = []
    for size in SIZES:
        x = generator.normal(size=(2 * size + 4, *shape)).astype(np.float32)
        y = x.reshape(len(x), -1)[:, 0]
        pairs.append((x, y if real else (y > 0).astype(np.int64)))
    return ClientData.of(pairs, test=0.5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(37, 50), nn.ReLU(), nn.Linear(50, 3))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))


CASES: dict[str, tuple[Any, ClientData]] = {
    "mlp": (NeuralProblem(mlp), data((37,))),
    "convolution": (NeuralProblem(convolution), data((2, 6, 6))),
    "targets": (NeuralProblem(lambda: nn.Linear(37, 1), "mse"), data((37,), real=True)),
    "regression": (GLM(37, "squared"), data((37,), real=True)),
}


def trained(name: str, method: Any) -> Run:
    problem, clients = CASES[name]
    return simulate(method, problem, clients, 2, evaluate_every=0)


def scores(run: Run, clients: Iterable[int], model: str = "personal") -> dict[str, list[float]]:
    """Return the test metrics of some clients, as the pool of a finished run finds them."""
    key = Key(run.seed, round=len(run.records) - 1)
    requests = [ClientRequest(run.pool.clients[i], key, run.server, upload=False) for i in clients]
    found = [each.values[model]["test"] for each in run.pool.evaluate(requests, run.server)]
    return {name: [values[name] for values in found] for name in found[0]}


def personal(run: Run) -> dict[str, list[float]]:
    return scores(run, range(len(SIZES)))


@pytest.mark.bits
@pytest.mark.parametrize("most", [0, 20, 1000])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", [Ditto(local_steps=2), FedAvg(local_steps=2)])
def test_scores_have_the_bits_that_each_client_would_find_alone(
    name: str, method: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many share a job, and with any number of threads."""
    run = trained(name, method)
    with threads.single_threaded():
        alone = [scores(run, [client]) for client in range(len(SIZES))]
    monkeypatch.setattr(evaluator, "_PIECE_ROWS", most)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    before = torch.get_num_threads()
    for count, large in ((1, 0), (3, 0), (3, 10**9)):
        monkeypatch.setattr(evaluator, "_LARGE", large)
        torch.set_num_threads(count)
        try:
            found = personal(run)
        finally:
            torch.set_num_threads(before)
        for metric, values in found.items():
            assert values == [score[metric][0] for score in alone]


@pytest.mark.bits
@pytest.mark.parametrize("name", CASES)
def test_the_global_model_is_evaluated_with_the_same_bits_by_any_number_of_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(name, FedAvg(local_steps=2))
    monkeypatch.setattr(evaluator, "PIECE_BYTES", 37 * 4 * 16)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    before, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            found.append(scores(run, range(len(SIZES)), "global"))
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]


def test_of_clients_that_are_evaluated_together_the_one_at_fault_is_named() -> None:
    problem, clients = CASES["mlp"]
    y = clients.y.clone()
    run = simulate(FedAvg(local_steps=2), problem, replace(clients, y=y), 1, evaluate_every=0)
    personal(run)
    y[int(clients.test[3][0])] = 7  # there are three outputs
    with pytest.raises(ClientError, match="client 3 failed in evaluation"):
        personal(run)


def test_models_that_are_tuned_are_evaluated_as_those_that_are_not() -> None:
    """No step is a fixed point, and batches only pad."""
    problem, clients = CASES["mlp"]
    plain = simulate(Ditto(local_steps=2), problem, clients, 2)
    tuned = simulate(
        Ditto(local_steps=2),
        problem,
        clients,
        2,
        evaluation=Evaluation(fine_tune_steps=1, fine_tune_lr=1e-12),
    )
    ours, theirs = (run.metrics[-1]["personal"]["test"]["loss"] for run in (plain, tuned))
    assert ours["mean"] == pytest.approx(theirs["mean"], rel=1e-5)
    assert ours["std"] == pytest.approx(theirs["std"], rel=1e-5)


class Counted:
    """Counts how many rows are scored."""

    def __init__(self, problem: NeuralProblem, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        score = type(problem).output_metrics

        def counting(problem: NeuralProblem, output: Tensor, y: Tensor) -> dict[str, Tensor]:
            self.rows += len(y)
            return score(problem, output, y)

        monkeypatch.setattr(type(problem), "output_metrics", counting)


@pytest.mark.parametrize(
    ("method", "changes", "times"),
    [
        (FedAvg(local_steps=1), {}, 1),
        (Ditto(local_steps=1), {}, 2),  # clients have personal models
        (FedAvg(local_steps=1), {"evaluation": Evaluation(fine_tune_steps=1)}, 2),
        (FedAvg(local_steps=1), {"precision": "float16"}, 2),  # clients receive a rounded model
    ],
)
def test_the_scores_of_the_global_model_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, method: Any, changes: dict[str, Any], times: int
) -> None:
    problem, clients = CASES["mlp"]
    run = simulate(method, problem, clients, 1, executor="loop", evaluate_every=0, **changes)
    counted = Counted(problem, monkeypatch)
    means = personal(run)
    assert counted.rows == times * sum(map(len, clients.test))
    assert (means == scores(run, range(len(SIZES)), "global")) is (times == 1)
