"""Metrics of any problem, per row and per set of rows, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.inprocess import InProcess
from torch import Tensor, nn

import parsifl
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import ClientError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.metrics import Metric, with_metrics
from parsifl.core.problem import Params
from parsifl.engine.callbacks import EarlyStopping
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.settings import Evaluation
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem


def distance(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs()


def r_squared(output: Tensor, y: Tensor) -> Tensor:
    return 1 - (output - y).square().sum() / (y - y.mean()).square().sum()


METRICS = [Metric("distance", False, distance), Metric("r2", True, per_set=r_squared)]
ALGORITHMS: tuple[Any, ...] = (FedAvg(lr=0.1, local_steps=2), Ditto(lr=0.1, local_steps=2))


def federation(dtype: type[Any] = np.float64) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    features = [draw.normal(size=(rows, 3)).astype(dtype) for rows in (12, 20, 9)]
    return [(x, (x @ np.ones(3) + draw.normal(size=len(x))).astype(dtype)) for x in features]


class Line:
    """A user's own problem: a linear model with an absolute loss."""

    primary_metric, higher_is_better = "mae", False
    supports_vmap, uses_batch_statistics = True, False

    def init(self, key: Key) -> Params:  # noqa: ARG002 - the same for every seed
        """Return zeros."""
        return {"w": torch.zeros(3, dtype=torch.float64)}

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the value."""
        value: Tensor = x @ params["w"]
        return value

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the weighted mean absolute error."""
        errors = (self.predict(params, batch.x) - batch.y).abs()
        return (errors * batch.weight).sum() / batch.weight.sum().clamp(min=1)

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return the absolute errors."""
        return {"mae": (self.predict(params, rows.x) - rows.y).abs()}


class Flat(nn.Module):
    """A linear layer with one output per row."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per row."""
        value: Tensor = self.line(x)[:, 0]
        return value


PROBLEMS: dict[str, Any] = {
    "network": NeuralProblem(Flat, "mse", dtype=torch.float64),
    "glm": GLM(3),
    "own": Line(),
}


@pytest.mark.parametrize("fine_tune", [0, 2])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["fedavg", "ditto"])
@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_every_kind_of_problem_takes_metrics(
    name: str, algorithm: Any, executor: Any, fine_tune: int
) -> None:
    problem, data = PROBLEMS[name], parsifl.ClientData.of(federation(), test=0.5)
    run = parsifl.simulate(
        algorithm, problem, data, 2, executor=executor, metrics=METRICS,
        evaluation=Evaluation(fine_tune_steps=fine_tune, weighting="uniform"),
    )  # fmt: skip
    assert not hasattr(problem, "extra_metrics") or not problem.extra_metrics
    models = {"global": [run.model] * 3, "personal": [run.personal(i) for i in range(3)]}
    for kind, each in models.items():
        values = run.records[-1].scores[kind]["test"]
        expected: dict[str, list[float]] = {"distance": [], "r2": []}
        for client, model in enumerate(each):
            assert model is not None
            rows = data.test[client]
            output = problem.predict(model.params, data.x[rows]).detach().numpy()
            y = data.y[rows].numpy()
            expected["distance"].append(float(np.abs(output - y).mean()))
            spread = ((y - y.mean()) ** 2).sum()
            expected["r2"].append(float(1 - ((output - y) ** 2).sum() / spread))
        for metric, column in expected.items():
            assert values[metric]["mean"] == pytest.approx(np.mean(column), rel=1e-9)
        # the worst client has the largest distance and the smallest share of variance
        assert values["distance"]["worst_decile"] == pytest.approx(max(expected["distance"]))
        assert values["r2"]["worst_decile"] == pytest.approx(min(expected["r2"]))


def test_metrics_do_not_change_other_numbers() -> None:
    problem, data = GLM(3, l2=0.1), federation()
    plain = parsifl.simulate(FedAvg(), problem, data, 2)
    more = parsifl.simulate(FedAvg(), problem, data, 2, metrics=METRICS)
    for before, after in zip(plain.records, more.records, strict=True):
        for model, splits in before.scores.items():
            for split, scores in splits.items():
                assert scores == {name: after.scores[model][split][name] for name in scores}


def test_a_metric_of_a_glm_reads_the_target_without_its_weight() -> None:
    seen: list[Any] = []

    def record(output: Tensor, y: Tensor) -> Tensor:
        seen.append((output.shape, y.shape))
        return output

    weighted = [(x, np.stack([y, np.full(len(y), 2.0)], 1)) for x, y in federation()]
    problem = GLM(3, weighted=True)
    run = parsifl.simulate(FedAvg(), problem, weighted, 1, metrics=[Metric("u", True, record)])
    assert "u" in run.records[-1].scores["personal"]["test"]
    assert all(output == y for output, y in seen)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_clients_for_which_a_score_is_undefined_are_left_out_of_its_means(executor: Any) -> None:
    def auc(_: Tensor, y: Tensor) -> Any:
        return float("nan") if len(y) == 6 else float(len(y))  # 6 test rows of the first client

    metrics = [Metric("auc", True, per_set=auc)]
    data = parsifl.ClientData.of(federation(), test=0.5)
    sizes = [len(rows) for rows in data.test]
    assert sizes.count(6) == 1
    options: dict[str, Any] = {"executor": executor, "metrics": metrics}
    run = parsifl.simulate(FedAvg(), GLM(3), data, 1, **options)
    defined = [size for size in sizes if size != 6]
    for model in ("global", "personal"):
        value = run.records[-1].scores[model]["test"]["auc"]
        assert value["mean"] == pytest.approx(np.average(defined, weights=defined))
        assert value["std"] == pytest.approx(np.std(defined))
        assert value["worst_decile"] == min(defined)


def test_a_score_that_fails_names_the_way_out() -> None:
    def fail(_: Tensor, __: Tensor) -> Tensor:
        raise ValueError("only one class")

    metrics = [Metric("auc", True, per_set=fail)]
    with pytest.raises(ClientError, match=r"'auc' fails .*only one class.*return float\('nan'\)"):
        parsifl.simulate(FedAvg(), GLM(3), federation(), 1, metrics=metrics)


def test_early_stopping_knows_the_direction_of_a_metric() -> None:
    growing = Metric("growing", True, per_set=lambda output, y: output.square().sum())  # noqa: ARG005
    shrinking = replace(growing, name="shrinking", higher_is_better=False)
    stop = EarlyStopping(patience=2, split="test", metric="growing")
    data = [(x, 9 * y) for x, y in federation()]
    options: dict[str, Any] = {"metrics": [growing, shrinking], "executor": "loop"}
    method = FedAvg(lr=0.001, local_steps=1)  # coefficients move away from 0 in every round
    assert len(parsifl.simulate(method, GLM(3), data, 8, callbacks=[stop], **options).records) == 8
    stop = replace(stop, metric="shrinking")
    assert len(parsifl.simulate(method, GLM(3), data, 8, callbacks=[stop], **options).records) == 3


def test_clients_of_a_deployment_report_the_metrics_of_their_problem(tmp_path: Path) -> None:
    def make(data: Any) -> Any:
        problem = problem_for("glm", data)
        first = Metric("first", True, lambda output, _: output[:, 0])
        last = Metric("last", True, per_set=lambda output, _: output[:, -1].sum())
        return with_metrics(problem, [first, last])

    chosen = Experiment("fedavg", {"local_steps": 1}, clients=3, rounds=1, model="glm")
    link = InProcess(chosen, tmp_path / "state", make=make)
    (record,) = link.run(tmp_path / "run")
    for model in ("global", "personal"):
        assert {"accuracy", "loss", "first", "last"} == record[model]["test"].keys()


@pytest.mark.parametrize(
    "functions", [{}, {"per_row": distance, "per_set": r_squared}, {"per_row": 3}]
)
def test_a_metric_has_one_function(functions: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="metric 'm' needs one function"):
        Metric("m", True, **functions)
    with pytest.raises(ConfigError, match="identifier such as 'top3', got 'top 3'"):
        Metric("top 3", True, distance)
    wrong: Any = "yes"
    with pytest.raises(ConfigError, match="of metric 'm' must be True or False, got 'yes'"):
        Metric("m", wrong, distance)


def test_a_metric_of_a_set_returns_one_number() -> None:
    several = Metric("several", True, per_set=lambda output, y: output - y)
    with pytest.raises(DataError, match="metric 'several' must return one number for all rows"):
        several.value(torch.zeros(3), torch.ones(3))
