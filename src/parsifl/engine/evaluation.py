"""The evaluation protocol.

Every number is defined by the model (global, or personal, optionally after k fine-tuning steps),
the clients, the split, the round, and the weighting of the mean over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from parsifl.core import config
from parsifl.core.config import Count, Fraction, Momentum, NonNegative, Positive, Size
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Problem

Select = Literal["last", "best-validation", "best-test"]
Clients = Literal["all", "sampled", "unseen"]


@final
@dataclass(frozen=True)
class Evaluation:
    """How models are evaluated.

    Parameters
    ----------
    fine_tune_steps, fine_tune_epochs
        SGD steps, or passes over its client's training rows, that every personal model takes
        before it is evaluated. They do not change the run. Set at most one of them.
    fine_tune_lr, fine_tune_batch_size, fine_tune_momentum, fine_tune_weight_decay
        Settings of the fine-tuning. fine_tune_lr=None uses the learning rate of the evaluated
        round.
    select
        Which round the headline number comes from: the last; the best on validation data; or the
        best on test data, as some papers do.
    clients
        Which clients are evaluated: all, those that have trained, or those held out of training.
    unseen
        The fraction of clients that is held out of training, for clients="unseen".
    weighting
        Whether the mean over clients is weighted by the rows of the split or uniform. It does not
        follow the algorithm's own `weighting`, which is about training; the report names both if
        they differ.
    train
        Whether models are also evaluated on the training rows, which takes extra time.
    """

    fine_tune_steps: Size = 0
    fine_tune_lr: Positive | None = 0.01
    fine_tune_batch_size: Count = 20
    fine_tune_momentum: Momentum = 0.0
    fine_tune_weight_decay: NonNegative = 0.0
    fine_tune_epochs: NonNegative = 0.0
    select: Select = "last"
    clients: Clients = "all"
    unseen: Fraction = 0.0
    weighting: Literal["samples", "uniform"] = "samples"
    train: bool = False

    def __post_init__(self) -> None:
        config.check(self)
        if self.fine_tune_steps and self.fine_tune_epochs:
            raise ConfigError(
                "fine_tune_steps and fine_tune_epochs are mutually exclusive: got "
                f"fine_tune_steps={self.fine_tune_steps} and "
                f"fine_tune_epochs={self.fine_tune_epochs:g}. Remove one of them."
            )

    @property
    def fine_tunes(self) -> bool:
        """Whether personal models are fine-tuned before they are evaluated."""
        return bool(self.fine_tune_steps or self.fine_tune_epochs)


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
        """Return mean, spread over clients and the mean of the worst tenth, for each metric."""
        uniform = evaluation.weighting == "uniform"
        weights = np.ones_like(self.samples) if uniform else self.samples
        return {
            # every metric except a maximised score is a loss
            name: _summary(
                values, weights, name == problem.primary_metric and problem.higher_is_better
            )
            for name, values in self.values.items()
        }


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
