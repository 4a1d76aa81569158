"""What FedGradMP's recipes share: the recovery problem, and errors against the truth by round."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import Rows
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData
from parsifl.data.registry import load
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl_reproduction.recipe import Result, Values

PAPER = "Jeong, Needell and Qin, Federated Gradient Matching Pursuit"
MACHINE = 1e-14


class Known:
    """A GLM whose truth is known: its metrics hold the relative error |x - x#| / |x#|."""

    def __init__(self, problem: GLM, truth: np.ndarray[Any, Any]) -> None:
        self._problem, self._truth = problem, torch.from_numpy(truth)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return the relative error, once for every row."""
        error = (params[self._problem.name] - self._truth).norm() / self._truth.norm()
        return {"mse": torch.ones_like(rows.weight) * error}


@dataclass(frozen=True)
class Recovery:
    """The paper's measurements: entries of A_i ~ N(mu_i, i^-decay), mu_i ~ N(0, alpha)."""

    alpha: float
    decay: float = 1.1
    sparsity: int = 10
    clients: int = 50
    dimension: int = 1000
    noise: float = 0.0

    def data(self, seed: int) -> tuple[ClientData, np.ndarray[Any, Any]]:
        """Draw the measurements; one row per client is evaluated, since only the truth counts."""
        made: Any = load("fedgradmp", seed=seed, **self.__dict__)
        rows = [np.flatnonzero(made.groups == client) for client in range(self.clients)]
        evaluated = [part[:1] for part in rows]
        none = [part[:0] for part in rows]
        data = ClientData(
            torch.from_numpy(made.x),
            torch.from_numpy(made.y),
            rows,
            none,
            evaluated,
            ({},) * self.clients,
            name="fedgradmp",
        )
        return data, made.truth

    def errors(
        self, method: AnyAlgorithm, rounds: int, seed: int, participation: float = 1.0
    ) -> Values:
        """Return relative errors by round."""
        data, truth = self.data(seed)
        problem: Any = Known(GLM(self.dimension, "squared-half"), truth)
        run = simulate(method, problem, data, rounds, seed=seed, participation=participation)
        curve = [_error(record) for record in run.metrics]
        return {
            "errors": curve,
            "diverged": not math.isfinite(curve[-1]) or bool(run.metrics[-1]["dropped"]),
        }

    def seconds(self, method: AnyAlgorithm, rounds: int, seed: int) -> float:
        """Return the CPU seconds of the same rounds without evaluation."""
        problem, data = GLM(self.dimension, "squared-half"), self.data(seed)[0]
        started = time.process_time()
        simulate(method, problem, data, rounds, seed=seed, evaluate_every=0)
        return time.process_time() - started

    def oracle(self, seed: int) -> float:
        """Return the relative error of pooled least squares on the true support."""
        data, truth = self.data(seed)
        support = np.flatnonzero(truth)
        x, y = np.asarray(data.x)[:, support], np.asarray(data.y)
        found = np.zeros_like(truth)
        found[support] = np.linalg.lstsq(x, y, rcond=None)[0]
        return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def _error(record: dict[str, Any]) -> float:
    return float(record["global"]["test"]["mse"]["mean"])


def rounds_until(values: Values, target: float) -> int | None:
    """Return the first round whose error is below the target."""
    below = [at for at, error in enumerate(values["errors"], start=1) if error < target]
    return below[0] if below else None


def final(results: Sequence[Result], label: str) -> list[float]:
    """Return the last errors of a label over seeds; infinite where a run diverged."""
    return [
        math.inf if r.values["diverged"] else float(r.values["errors"][-1])
        for r in results
        if r.label == label
    ]


def errors_at(results: Sequence[Result], label: str, round: int) -> list[float]:
    """Return the errors of a label after a round, over seeds; infinite where a run diverged."""
    found = [r.values["errors"][round - 1] for r in results if r.label == label]
    return [float(error) if math.isfinite(error) else math.inf for error in found]


def scientific(values: Sequence[float]) -> str:
    """Return the median and the range in scientific notation.

    >>> scientific([1e-3, 2e-3, 4e-3])
    '2.0e-03 (1.0e-03 to 4.0e-03)'
    """
    if not values:
        return ""
    middle = sorted(values)[len(values) // 2]
    return f"{middle:.1e} ({min(values):.1e} to {max(values):.1e})"
