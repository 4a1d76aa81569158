"""The evaluation protocol.

Every number is defined by the model (global, or personal, optionally after k fine-tuning steps),
the clients, the split, the round, and the weighting of the mean over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parsifl.core.metrics import extra_metrics, higher_is_better
from parsifl.core.problem import Problem
from parsifl.engine.settings import Evaluation


@dataclass(frozen=True)
class Scores:
    """The metrics of every evaluated client."""

    clients: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    values: dict[str, npt.NDArray[np.float64]]
    fallbacks: tuple[str, ...] = ()
    """Why some batches of clients were evaluated one by one; empty if none were."""

    def to_json(self) -> dict[str, Any]:
        """Return plain lists."""
        values = {name: column.tolist() for name, column in self.values.items()}
        return {"clients": self.clients.tolist(), "samples": self.samples.tolist(), **values}

    def summary(self, evaluation: Evaluation, problem: Problem) -> dict[str, dict[str, float]]:
        """Return mean, spread over clients and the mean of the worst tenth, for each metric.

        Clients for which a metric of a set is undefined (NaN) are left out of its numbers. NaN in
        any other metric is that of a diverged model, so it stays visible.
        """
        uniform = evaluation.weighting == "uniform"
        weights = np.ones_like(self.samples) if uniform else self.samples
        of_sets = {each.name for each in extra_metrics(problem) if each.per_set is not None}
        summaries = {}
        for name, values in self.values.items():
            defined = ~np.isnan(values) if name in of_sets else np.ones(len(values), bool)
            if not defined.any():
                defined[:] = True
            better = higher_is_better(problem, name)
            summaries[name] = _summary(values[defined], weights[defined], better)
        return summaries


def _summary(
    values: npt.NDArray[np.float64], weights: npt.NDArray[Any], large_is_good: bool
) -> dict[str, float]:
    worst_first = np.sort(values) if large_is_good else np.sort(values)[::-1]
    tenth = max(1, round(len(values) / 10))
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run has huge losses
        return {
            "mean": float(np.average(values, weights=weights)),
            "std": float(values.std()),
            "worst_decile": float(worst_first[:tenth].mean()),
        }
