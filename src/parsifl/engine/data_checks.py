"""Whether data and model fit each other: tried on a few rows before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsifl.core.batching import Rows
from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.executors import reason
from parsifl.linear.design import Design
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

_FEW = 2  # rows on which a model is tried: batch statistics need more than one


def stack_clients(
    problem: Problem, clients: Sequence[tuple[Any, Any]], *, test: float
) -> ClientData:
    """Stack a user's list; integers stay integers if the model takes no real numbers."""
    data = ClientData.of(clients, test=test)
    if not _integers(clients[0][0]):
        return data
    params = problem.init(Key(0))
    if isinstance(_tried(problem, params, data.x[:_FEW]), Exception):
        tokens = ClientData.of(clients, test=test, dtype=torch.int64)
        if isinstance(_tried(problem, params, tokens.x[:_FEW]), Tensor):
            return tokens
    return data


def check_fit(problem: Problem, params: Params, data: ClientData, x: Design, y: Tensor) -> None:
    """Refuse data that the model cannot read, or whose targets are not what it predicts.

    `x` and `y` are the features and targets of `data` as the model is given them; it is tried with
    the parameters `params`. A user's own problem may mean anything by its methods: it is not tried.
    """
    if not isinstance(problem, NeuralProblem | GLM):
        return
    few, targets = x[:_FEW], y[:_FEW]
    output = _tried(problem, params, few)
    if isinstance(output, Exception):
        rows = f"{'' if isinstance(few, Tensor) else 'sparse '}rows of shape {list(x.shape[1:])}"
        raise DataError(
            f"the model cannot read {rows} and {x.dtype} ({reason(output)}); "
            + _expected(problem, params, few)
        ) from output
    if isinstance(problem, NeuralProblem) and problem.higher_is_better:
        _check_labels(data, y, output)
    try:
        problem.metrics(params, Rows(few, targets, torch.ones(len(targets), dtype=output.dtype)))
    except Exception as error:
        raise DataError(
            f"targets of shape {list(y.shape[1:])} and {y.dtype} are not what the model predicts, "
            f"shape {list(output.shape[1:])} ({reason(error)}); cross-entropy needs labels, as "
            "integers (int64), and mse as many numbers as outputs"
        ) from error


def _check_labels(data: ClientData, y: Tensor, output: Tensor) -> None:
    if y.is_floating_point() or output.ndim < 2:
        return
    classes = output.shape[1]
    outside = (y < 0) | (y >= classes)
    if not outside.any():
        return
    wrong, found = outside.reshape(len(y), -1).any(1).numpy(), []
    for part in map(Ragged.of, (data.train, data.validation, data.test)):
        places = np.flatnonzero(wrong[part.values])
        if len(places):
            found.append((int(part.owners()[places[0]]), int(part.values[places[0]])))
    if found:
        client, row = min(found)
        raise DataError(
            f"client {client} has the label {int(y[row][outside[row]][0])}, but the model tells "
            f"{classes} classes; it needs labels from 0 that are below its outputs"
        )


def _tried(problem: Problem, params: Params, rows: Any) -> Tensor | Exception:
    try:
        output: Any = problem.predict(params, rows)
    except Exception as error:  # a module may fail in any way
        return error
    told = f"it returns a {type(output).__name__} instead of a tensor"
    return output if isinstance(output, Tensor) else TypeError(told)


def _expected(problem: Problem, params: Params, rows: Design) -> str:
    """Say what a model reads, and how these rows become it."""
    if isinstance(problem, GLM):
        return f"it has {problem.features} features"
    if not isinstance(rows, Tensor):
        return "give dense rows, X.toarray(), or use parsifl.GLM, which reads sparse ones"
    if isinstance(_tried(problem, params, rows.to(torch.int64)), Tensor):
        return "it reads integers, which ClientData.of(clients, dtype=torch.int64) keeps"
    if isinstance(_tried(problem, params, rows.to(next(iter(params.values())).dtype)), Tensor):
        return "it reads real numbers, as ClientData.of(clients) makes of integers"
    layers = getattr(problem, "module", nn.Module()).named_modules()
    own = (f"{name}: {layer!r}" for name, layer in layers if [*layer.parameters(recurse=False)])
    return f"its first layer is {next(own, type(problem).__name__).removeprefix(': ')}"


def _integers(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not x.is_floating_point() and x.dtype != torch.bool
    return not hasattr(x, "tocsr") and np.asarray(x).dtype.kind in "iu"
