"""Whether data fit a module and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parsifl.core.data_trial import FEW, check_metrics, try_predict, unreadable
from parsifl.core.errors import DataError, RowError
from parsifl.core.problem import HasModule, Params
from parsifl.nn.losses import Loss


def check_data(problem: HasModule, loss: Loss, params: Params, x: Any, y: Tensor) -> None:
    """Raise DataError for rows that a module cannot read, or targets that its loss cannot use."""
    output = try_predict(problem, params, x[:FEW])
    if isinstance(output, Exception):
        raise unreadable(x, output, _expected(problem, params, x[:FEW])) from output
    if loss == "cross-entropy":
        _check_labels(y, output)
    check_metrics(problem, params, x, y, output)


def _check_labels(y: Tensor, output: Tensor) -> None:
    if y.is_floating_point():
        shape = list(y.shape[1:])
        one_hot = y.ndim == 2 and y.shape[1] == output.shape[-1] and y.shape[1] > 1
        remedy = "pass y.argmax(1)" if one_hot else "pass y.astype(int), or set loss='mse'"
        kind = "one-hot targets or probabilities" if one_hot else "real targets"
        raise DataError(
            f"cross-entropy needs one integer label per row (int64), got {kind} of shape {shape} "
            f"and {y.dtype}: {remedy}"
        )
    if output.ndim < 2:
        return
    classes = output.shape[1]
    outside = (y < 0) | (y >= classes)
    wrong = outside.reshape(len(y), -1).any(1).nonzero()[:, 0]
    if len(wrong):

        def describe(row: int) -> str:
            label = int(y[row][outside[row]][0])
            return (
                f"label {label}, but the model has {classes} outputs: labels must be in "
                f"[0, {classes})"
            )

        raise RowError(wrong.tolist(), describe)


def _expected(problem: HasModule, params: Params, rows: Any) -> str:
    """Say what the module reads, and how to turn these rows into it."""
    if not isinstance(rows, Tensor):
        return "give dense rows, X.toarray(), or use parsifl.GLM, which reads sparse ones"
    if isinstance(try_predict(problem, params, rows.to(torch.int64)), Tensor):
        return "it reads integers, which ClientData.of(clients, dtype=torch.int64) keeps"
    dtype = next(iter(params.values())).dtype
    if isinstance(try_predict(problem, params, rows.to(dtype)), Tensor):
        return "it reads real numbers, as ClientData.of(clients) makes of integers"
    return f"its first layer is {first_layer(problem.module)}"


def first_layer(module: nn.Module) -> str:
    """Return the first layer with parameters, with its name."""
    layers = module.named_modules()
    own = (f"{name}: {layer!r}" for name, layer in layers if [*layer.parameters(recurse=False)])
    return next(own, type(module).__name__).removeprefix(": ")
