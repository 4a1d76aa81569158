"""Metrics of any problem: one number per row, or one number for all rows of a client's split.

A problem has its own metrics (`Problem.metrics`). Further ones belong to a run: pass them to
`simulate(metrics=[...])`, or to a problem that takes `metrics=`. Records, tables and the report
then show them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch import Tensor

from parsifl.core.batching import Rows
from parsifl.core.errors import ConfigError, DataError, reason
from parsifl.core.problem import Params, Problem

P = TypeVar("P", bound=Problem)
Score = Callable[[Tensor, Tensor], Tensor]
"""A function of the outputs [n, ...] and the targets [n] of rows."""


@final
@dataclass(frozen=True)
class Metric:
    """A score of a model's outputs. Exactly one of the functions is given.

    Parameters
    ----------
    name
        An identifier; the records have the metric under this name.
    higher_is_better
        Whether a larger value is better.
    per_row
        Returns one number per row [n]. Clients report the mean over their rows. It runs under
        `torch.func.vmap`, so it must not branch on values.
    per_set
        Returns one number for all rows of a client's split, for scores that are no mean over rows.
        NaN means that the score is undefined for these rows, such as an AUC of one class: the
        client is left out of the metric's means.

    Examples
    --------
    >>> import torch
    >>> error = Metric("error", False, per_row=lambda output, y: (output - y).abs())
    >>> error.rows(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0]))
    tensor([1., 0.])
    """

    name: str
    higher_is_better: bool
    per_row: Score | None = None
    per_set: Score | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError(
                f"a metric's name must be an identifier such as 'top3', got {self.name!r:.80}"
            )
        if not isinstance(self.higher_is_better, bool):
            raise ConfigError(
                f"higher_is_better of metric '{self.name}' must be True or False, got "
                f"{self.higher_is_better!r:.80}"
            )
        functions = [each for each in (self.per_row, self.per_set) if each is not None]
        if len(functions) != 1 or not callable(functions[0]):
            raise ConfigError(
                f"metric '{self.name}' needs one function (output, y): per_row, which returns a "
                "number per row, or per_set, which returns one number for all rows"
            )

    def rows(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the value of each row."""
        assert self.per_row is not None
        values = self._call(self.per_row, output, y)
        if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise DataError(
                f"metric '{self.name}' must return one number per row, a tensor of shape "
                f"{[len(y)]}, got {shape}: do not average over rows, Parsifl does"
            )
        return values

    def value(self, output: Tensor, y: Tensor) -> float:
        """Return the value of a set of rows."""
        assert self.per_set is not None
        try:
            value = self._call(self.per_set, output, y)
        except DataError as error:
            raise DataError(
                f"{error}; return float('nan') for rows on which the score is undefined"
            ) from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"metric '{self.name}' must return one number for all rows ({reason(error)})"
            ) from error

    def _call(self, function: Score, output: Tensor, y: Tensor) -> Any:
        try:
            return function(output, y)
        except Exception as error:
            raise DataError(f"metric '{self.name}' fails ({reason(error)})") from error


def checked_metrics(metrics: Any) -> tuple[Metric, ...]:
    """Return metrics as a tuple; raise ConfigError for other values and for equal names."""
    if isinstance(metrics, Mapping | str) or not isinstance(metrics, Iterable):
        raise ConfigError(
            "metrics must be a list such as [Metric('error', False, per_row=...)], got a "
            f"{type(metrics).__name__}"
        )
    checked = tuple(metrics)
    for metric in checked:
        if not isinstance(metric, Metric):
            raise ConfigError(
                "metrics must be a list such as [Metric('error', False, per_row=...)], got "
                f"{metric!r:.80} in it"
            )
    names = [metric.name for metric in checked]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two metrics are called '{name}': rename one of them")
    return checked


def extra_metrics(problem: Problem) -> tuple[Metric, ...]:
    """Return the metrics of a problem besides its own."""
    metrics: tuple[Metric, ...] = getattr(problem, "extra_metrics", ())
    return metrics


def with_metrics(problem: P, metrics: Sequence[Metric]) -> P:
    """Return a problem with further metrics; the problem itself does not change."""
    added = checked_metrics(metrics)
    if not added:
        return problem
    extended = copy.copy(problem)
    every = checked_metrics((*extra_metrics(problem), *added))
    object.__setattr__(extended, "extra_metrics", every)  # the problem may be frozen
    return extended


def higher_is_better(problem: Problem, name: str) -> bool:
    """Return whether a larger value of a metric is better; other metrics of problems are losses."""
    if name == problem.primary_metric:
        return problem.higher_is_better
    return any(each.name == name and each.higher_is_better for each in extra_metrics(problem))


def scored(problem: Problem, params: Params, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the outputs and targets of rows, as metrics read them."""
    read = getattr(problem, "scored", None)
    if read is not None:
        outputs_and_targets: tuple[Tensor, Tensor] = read(params, rows)
        return outputs_and_targets
    return problem.predict(params, rows.x), rows.y
