"""Mistakes in the arguments of a run are told before any work is done."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsifl.algorithm import Method
from parsifl.data.clients import ClientData, Ragged
from parsifl.engine.evaluation import Evaluation
from parsifl.engine.network import Network
from parsifl.engine.tasks import reason
from parsifl.errors import ConfigError, DataError
from parsifl.keys import Key
from parsifl.problem import Params, Problem
from parsifl.problems.design import Design
from parsifl.problems.glm import GLM
from parsifl.problems.neural import NeuralProblem
from parsifl.work import Rows

_FEW = 2  # rows on which a model is tried: batch statistics need more than one


def check_parts(algorithm: Any, problem: Any, clients: Any) -> None:
    """Refuse what is no method, no problem or no data, and say what to write instead."""
    if not isinstance(algorithm, Method):
        told = repr(algorithm) if isinstance(algorithm, str) else _kind(algorithm)
        name = algorithm if isinstance(algorithm, str) else "fedavg"
        raise ConfigError(
            f"algorithm must be a configured method, got {told}; write parsifl.get({name!r}), "
            "or run a parsifl.experiment.Experiment, which takes names"
        )
    if isinstance(problem, nn.Module):
        raise ConfigError(
            f"problem must say what is learned, got the bare module {type(problem).__name__}; "
            "write parsifl.NeuralProblem(module)"
        )
    if isinstance(problem, type) or not isinstance(problem, Problem):
        raise ConfigError(
            f"problem must be a parsifl.NeuralProblem or a parsifl.GLM, got {_kind(problem)}"
        )
    if not isinstance(clients, ClientData) and (
        isinstance(clients, str) or not isinstance(clients, Sequence)
    ):
        raise ConfigError(
            "clients must be a list with one (X, y) for each client, or a ClientData (as "
            f"parsifl.data.prepare returns it), got {_kind(clients)}"
        )


def check_learnable(problem: Problem) -> int:
    """Refuse a model that has nothing to learn, or whose device is not there; return its bytes."""
    try:
        params = problem.init(Key(0))
    except (RuntimeError, AssertionError) as error:
        device = getattr(problem, "device", "cpu")
        if str(device) == "cpu":
            raise
        raise ConfigError(f"the device {str(device)!r} cannot be used: {error}") from error
    if not params:
        raise ConfigError("the model has no parameters: there is nothing to learn")
    return sum(value.nbytes for value in params.values())


def check_options(options: Mapping[str, Any], evaluation: Any, network: Any, folder: Any) -> None:
    """Refuse numbers and settings of the wrong kind."""
    for name, least in (("rounds", 1), ("seed", 0), ("evaluate_every", 0), ("state_limit", 0)):
        value = options[name]
        if not _is(value, numbers.Integral) or value < least:
            raise ConfigError(
                f"{name} must be a whole number and at least {least}, got {_shown(value)}"
            )
    share = options["participation"]
    if not _is(share, numbers.Real):
        raise ConfigError(
            f"participation must be a number above 0 and at most 1, got {_shown(share)}"
        )
    progress = options["progress"]
    if progress is not None and not callable(progress):
        raise ConfigError(
            f"progress must be a function that takes the record of a round, got {_kind(progress)}"
        )
    for name, given, kind, wanted in (
        ("evaluation", evaluation, Evaluation, "parsifl.Evaluation(...)"),
        ("network", network, Network, "parsifl.Network(...)"),
        ("folder", folder, (str, Path), "a path"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ConfigError(f"{name} must be {wanted}, got {_kind(given)}")


def pool(problem: Problem, clients: Sequence[tuple[Any, Any]]) -> ClientData:
    """Pool a user's list; integers stay what they are where the model takes no real numbers."""
    data = ClientData.of(clients)
    if not _integers(clients[0][0]):
        return data
    params = problem.init(Key(0))
    if isinstance(_tried(problem, params, data.x[:_FEW]), Exception):
        tokens = ClientData.of(clients, dtype=torch.int64)
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
    if isinstance(problem, NeuralProblem) and problem.maximize:
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


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else _kind(value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
