"""Callbacks: early stopping, and the distance to known parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from parsifl.core.errors import CapabilityError, ConfigError, unknown
from parsifl.core.metrics import higher_is_better
from parsifl.core.problem import Params
from parsifl.data.ragged import Array
from parsifl.engine.record import RoundRecord
from parsifl.engine.training import RoundEnd, StopTraining


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a validation score has not improved for `patience` evaluated rounds.

    The decision depends only on the records, so a resumed run stops in the same round.

    Parameters
    ----------
    patience
        Number of consecutive evaluated rounds without an improvement before the run stops.
    min_delta
        The smallest change that counts as an improvement.
    model, split, metric
        The score to monitor. The default metric is the problem's primary one.
    """

    patience: int = 5
    min_delta: float = 0.0
    model: Literal["global", "personal"] = "personal"
    split: Literal["validation", "test"] = "validation"
    metric: str | None = None

    reads_scores = True

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise ConfigError(
                f"patience must be at least 1 and min_delta at least 0, got patience="
                f"{self.patience}, min_delta={self.min_delta}"
            )

    def __call__(self, event: RoundEnd, /) -> None:
        """Raise `StopTraining` if the score has stopped improving."""
        name = self.metric or event.problem.primary_metric
        larger = higher_is_better(event.problem, name)
        scores = [self._score(record, name) for record in (*event.history, event.record)]
        known = [score if larger else -score for score in scores if score is not None]
        if scores[-1] is None:
            if event.record.scores and not known:
                raise ConfigError(
                    f"EarlyStopping watches the {self.model} {name} on {self.split} rows, which is "
                    "not recorded: hold rows out (validation=0.1), or watch another score"
                )
            return
        best, waited = -math.inf, 0
        for score in known:
            waited = 0 if score > best + self.min_delta else waited + 1
            best = max(best, score)
        if waited >= self.patience:
            raise StopTraining(
                f"{self.model} {name} on {self.split} rows has not improved for {waited} "
                "evaluated rounds"
            )

    def _score(self, record: RoundRecord, name: str) -> float | None:
        summary = record.scores.get(self.model, {}).get(self.split, {}).get(name)
        if summary is None:
            return None
        return summary["mean"] if math.isfinite(summary["mean"]) else -math.inf


@dataclass(frozen=True)
class DistanceToTruth:
    """Record ||w - w*|| / ||w*|| of the global model as the metric `name`.

    Parameters
    ----------
    truth
        The known parameters as arrays or tensors, by name; other parameters are not compared.
    """

    truth: Mapping[str, Tensor | Array]
    name: str = "distance"

    def __post_init__(self) -> None:
        if not isinstance(self.truth, Mapping):
            raise ConfigError(
                "DistanceToTruth: truth must map names of parameters to values, as "
                f"{{'coef': values}}; got {type(self.truth).__name__}"
            )

    def __call__(self, event: RoundEnd, /) -> Mapping[str, float]:
        """Return the relative distance."""
        model = event.algorithm.model(event.problem, event.server)
        if model is None:
            raise CapabilityError(
                f"{event.algorithm.title()} has no global model to compare with the truth"
            )
        known = {name: self._known(name, value, model.params) for name, value in self.truth.items()}
        gap = sum(
            float((model.params[name] - value).double().square().sum())
            for name, value in known.items()
        )
        size = sum(float(value.double().square().sum()) for value in known.values())
        return {self.name: math.sqrt(gap / size) if size else math.sqrt(gap)}

    def _known(self, name: str, value: Tensor | Array, params: Params) -> Tensor:
        """Return a known parameter as a tensor, checked against the model's."""
        if name not in params:
            raise ConfigError(f"DistanceToTruth: {unknown('parameter', name, params)}")
        try:
            tensor = (
                value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, float))
            )
        except (TypeError, ValueError):
            raise ConfigError(
                f"DistanceToTruth: the truth of '{name}' must be an array or a tensor of numbers, "
                f"got {type(value).__name__}"
            ) from None
        if tensor.shape != params[name].shape:
            raise ConfigError(
                f"DistanceToTruth: the truth of '{name}' has shape {tuple(tensor.shape)}, but the "
                f"parameter has shape {tuple(params[name].shape)}: give one value for each entry"
            )
        return tensor
