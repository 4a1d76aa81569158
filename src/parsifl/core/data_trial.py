"""Tries a model on two rows, so that data that do not fit are rejected before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parsifl.core.batching import Rows
from parsifl.core.errors import DataError, reason
from parsifl.core.problem import Params, Problem

FEW = 2  # rows on which a model is tried: batch statistics need more than one


def try_predict(problem: Problem, params: Params, rows: Any) -> Tensor | Exception:
    """Return the output for these rows, or what went wrong."""
    try:
        output: Any = problem.predict(params, rows)
    except Exception as error:  # a module may fail in any way
        return error
    if isinstance(output, Tensor):
        return output
    return TypeError(f"it returns a {type(output).__name__} instead of a tensor")


def check_metrics(problem: Problem, params: Params, x: Any, y: Tensor, output: Tensor) -> None:
    """Raise DataError unless the metrics of the first rows can be computed."""
    targets = y[:FEW]
    try:
        problem.metrics(params, Rows(x[:FEW], targets, torch.ones(len(targets)).to(output.dtype)))
    except Exception as error:
        raise DataError(
            f"targets of shape {list(y.shape[1:])} and {y.dtype} do not match what the model "
            f"predicts, shape {list(output.shape[1:])} ({reason(error)}); cross-entropy needs "
            "labels, as integers (int64), and mse as many numbers as outputs"
        ) from error


def unreadable(x: Any, error: Exception, expected: str) -> DataError:
    """Return the error for rows that the model cannot read."""
    rows = f"{'' if isinstance(x, Tensor) else 'sparse '}rows of shape {list(x.shape[1:])}"
    return DataError(f"the model cannot read {rows} and {x.dtype} ({reason(error)}); {expected}")
