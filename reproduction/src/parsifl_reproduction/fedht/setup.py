"""What Fed-HT's recipes share: a federation, a grid of K and step sizes, objectives by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from parsifl.algorithms.distributediht import DistributedIHT
from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ClientError
from parsifl.data.clients import ClientData
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd
from parsifl.linear.glm import GLM
from parsifl_reproduction.recipe import Result, Values

PAPER = "Tong et al., Federated Nonconvex Sparse Learning (Fed-HT and FedIter-HT)"
METHODS = ("Fed-HT", "FedIter-HT", "Distributed-IHT")
STEPS = (3, 5, 8, 10)
RATES = (10.0, 1.0, 0.6, 0.3, 0.1, 0.06, 0.03, 0.01, 0.001)
EVERY = 5
GROWTH = 1.1
"""The theory's 1 / omega: how fast batches grow from round to round, if they do."""
DIVERGED = 1e9
"""An objective beyond this counts as infinite."""


@dataclass(frozen=True)
class Setting:
    """One point of the paper's grid; a steady one has the theory's step and growing batches."""

    method: str
    steps: int
    lr: float
    steady: bool = False

    @property
    def label(self) -> str:
        """The name of its jobs."""
        rate = "1/(6l)" if self.steady else f"{self.lr:g}"
        return f"{self.method} K={self.steps} lr={rate}"

    def build(self, tau: int, batch: int) -> AnyAlgorithm:
        """Return the algorithm."""
        common: dict[str, Any] = {
            "tau": tau,
            "lr": self.lr,
            "batch_size": batch,
            "scope": "row",
            "batch_growth": GROWTH if self.steady else 1.0,
            "weighting": "uniform",  # the objective is the mean over clients of their mean losses
        }
        if self.method == "Distributed-IHT":
            return DistributedIHT(**common)
        kind = FedHT if self.method == "Fed-HT" else FedIterHT
        return kind(local_steps=self.steps, **common)


def grid(steps: Sequence[int], rates: Sequence[float]) -> list[Setting]:
    """Return the settings of all methods; Distributed-IHT has one step."""
    pairs = [(k, rate) for k in steps for rate in rates]
    local = [Setting(method, k, rate) for method in METHODS[:2] for k, rate in pairs]
    return local + [Setting(METHODS[2], 1, rate) for rate in rates]


def all_training(data: ClientData) -> ClientData:
    """Give every row to training: the paper plots the objective itself."""
    nobody = [np.asarray(rows)[:0] for rows in data.train]
    return replace(data, test=nobody, validation=nobody)


def objectives(
    setting: Setting, problem: GLM, data: ClientData, tau: int, batch: int, rounds: int, seed: int
) -> Values:
    """Return the objective every five rounds; infinite from where a run diverged.

    It is what is minimized: (1/N) sum_i f_i with equal weights, l2 term included.
    """
    values: list[float] = []
    name = "objective" if problem.l2 else "loss" if problem.datafit.classes else "mse"

    def note(event: RoundEnd) -> None:
        record = event.record
        if "global" in record.scores:
            found = float(record.scores["global"]["train"][name]["mean"])
            broken = record.dropped or not found < DIVERGED
            values.append(math.inf if broken else found)

    try:
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            simulate(
                setting.build(tau, batch),
                problem,
                data,
                rounds,
                seed=seed,
                evaluate_every=EVERY,
                evaluation=Evaluation(weighting="uniform", train=True),
                callbacks=[note],
            )
    except ClientError:
        values.append(math.inf)
    missing = rounds // EVERY - len(values)
    return {"objective": [_json(v) for v in values + [math.inf] * missing]}


def steepest(data: ClientData) -> float:
    """Return the largest |Z_i|^2 / n_i over clients: times the loss's own curvature, it is l."""
    return max(_spectral(data.x[np.asarray(part)]) ** 2 / len(part) for part in data.train)


def _spectral(rows: Any) -> float:
    """Return the largest singular value, by 30 power iterations (a lower bound, nearly tight)."""
    matrix = rows.numpy() if isinstance(rows, torch.Tensor) else rows
    vector = np.asarray(matrix.T @ (matrix @ np.ones(matrix.shape[1]))).ravel()
    size = 0.0
    for _ in range(30):
        length = float(np.linalg.norm(vector))
        if length == 0.0:
            return 0.0
        vector = np.asarray(matrix.T @ (matrix @ (vector / length))).ravel()
        size = math.sqrt(float(np.linalg.norm(vector)))
    return size


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def curve(results: Sequence[Result], label: str) -> list[float]:
    """Return the median objective over seeds by evaluated round."""
    rows = [
        [math.inf if v is None else float(v) for v in r.values["objective"]]
        for r in results
        if r.label == label
    ]
    return [float(v) for v in np.median(np.array(rows), axis=0)] if rows else []


def best(results: Sequence[Result], settings: Sequence[Setting], method: str) -> Setting:
    """Return the setting of a method with the least last objective."""
    mine = [setting for setting in settings if setting.method == method]
    return min(mine, key=lambda s: curve(results, s.label)[-1])


def rounds_to(values: Sequence[float], target: float) -> int | None:
    """Return the first evaluated round that is at least as good as the target."""
    below = [EVERY * at for at, value in enumerate(values, start=1) if value <= target]
    return below[0] if below else None
