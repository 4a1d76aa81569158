"""Checks before training: the arguments of a run, and whether data and model match."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsifl.core.algorithm import (
    AnyAlgorithm,
    FederatedAlgorithm,
    check_profile,
    lacking,
    unread_entries,
)
from parsifl.core.batching import Rows
from parsifl.core.errors import ConfigError, DataError, ParsiflWarning, RowError
from parsifl.core.keys import Key
from parsifl.core.metrics import extra_metrics, scored
from parsifl.core.problem import FEW, Params, Problem, try_predict
from parsifl.data.client_rows import has_integer_features
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.linear.design import Design


def check_parts(algorithm: Any, problem: Any, clients: Any) -> None:
    """Reject wrong types of algorithm, problem and data with an error that suggests a fix."""
    if not isinstance(algorithm, FederatedAlgorithm):
        shown = repr(algorithm) if isinstance(algorithm, str) else _kind(algorithm)
        name = algorithm if isinstance(algorithm, str) else "fedavg"
        remedy = f"parsifl.get({name!r})"
        if isinstance(algorithm, type) and issubclass(algorithm, FederatedAlgorithm):
            remedy = f"{algorithm.__name__}()"
        raise ConfigError(
            f"algorithm must be a configured algorithm, got {shown}; write {remedy}, or run a "
            "parsifl.engine.experiment.Experiment, which takes names"
        )
    if isinstance(problem, nn.Module):
        raise ConfigError(
            f"problem must be a model with a loss, got the bare module {type(problem).__name__}; "
            "write parsifl.NeuralProblem(module)"
        )
    if isinstance(problem, type) or not isinstance(problem, Problem):
        missing = lacking(problem, Problem) if hasattr(problem, "loss") else []
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise ConfigError(
            "problem must be a parsifl.NeuralProblem, a parsifl.GLM or an object with the members "
            f"of parsifl.core.problem.Problem, got {_kind(problem)}{lacks}"
        )
    if not isinstance(clients, ClientData) and (
        isinstance(clients, str) or not isinstance(clients, Sequence)
    ):
        raise ConfigError(
            "clients must be a list with one (X, y) for each client, or a ClientData (as "
            f"parsifl.data.prepare returns it), got {_kind(clients)}"
        )


def check_numbers(data: ClientData) -> None:
    """Reject the data of a client that is alone on a machine: a simulation has all clients."""
    if data.first:
        raise ConfigError(
            f"the clients of a simulation have numbers from 0, got first={data.first}: remove "
            "`first`, which is the number of a client in a deployment"
        )


def check_learnable(problem: Problem) -> int:
    """Reject a model without parameters; return its size in bytes."""
    params = problem.init(Key(0))
    if not params:
        raise ConfigError("the model has no parameters: there is nothing to learn")
    return sum(value.nbytes for value in params.values())


def check_arguments(callbacks: Sequence[Any], run_dir: Any) -> None:
    """Reject callbacks and a run directory of the wrong type."""
    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(
                f"callbacks must be functions that take a RoundEnd, got {_kind(callback)}"
            )
    if run_dir is not None and not isinstance(run_dir, str | Path):
        raise ConfigError(f"run_dir must be a path, got {_kind(run_dir)}")
    if run_dir == "":
        raise ConfigError('run_dir is empty; write "." for the current directory')


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def check_profiles(algorithm: AnyAlgorithm, data: ClientData) -> None:
    """Reject misspelt entries of the device profiles; warn about those that are not read."""
    fields = ("flops_per_second", *algorithm.profile_fields())
    for client, profile in enumerate(data.profiles):
        if profile:
            check_profile(client, profile, fields)
    if unread := unread_entries(algorithm, data.profiles):
        warnings.warn(unread, ParsiflWarning, stacklevel=3)


def stack_clients(problem: Problem, clients: Sequence[Any], *, test: float) -> ClientData:
    """Stack a user's list; integers stay integers if the model does not accept real numbers."""
    data = ClientData.of(clients, test=test)
    if not has_integer_features(clients[0]):
        return data
    params = problem.init(Key(0))
    if isinstance(try_predict(problem, params, data.x[:FEW]), Exception):
        tokens = ClientData.of(clients, test=test, dtype=torch.int64)
        if isinstance(try_predict(problem, params, tokens.x[:FEW]), Tensor):
            return tokens
    return data


def check_primary_metric(problem: Problem, params: Params, x: Design, y: Tensor) -> None:
    """Reject a problem whose metrics lack its primary one; rows that it cannot read are no error.

    Those are reported by other checks, or by the first round.
    """
    try:
        rows = Rows(x[:FEW], y[:FEW], next(iter(params.values())).new_ones(len(y[:FEW])))
        metrics = problem.metrics(params, rows)
    except Exception:  # a user's problem may raise anything
        return
    if problem.primary_metric not in metrics:
        raise ConfigError(
            f"{type(problem).__name__}.primary_metric is '{problem.primary_metric}', but its "
            f"metrics() returns {', '.join(map(repr, metrics)) or 'nothing'}: use the same name in "
            "both"
        )


def check_extra_metrics(problem: Problem, params: Params, x: Design, y: Tensor) -> None:
    """Reject a further metric that has the name of one of the problem's, or that fails.

    Rows that the problem cannot read are no error here.
    """
    extra = extra_metrics(problem)
    try:
        rows = Rows(x[:FEW], y[:FEW], next(iter(params.values())).new_ones(len(y[:FEW])))
        names = problem.metrics(params, rows) if extra else {}
        output, target = scored(problem, params, rows) if extra else (y, y)
    except Exception:  # a user's problem may raise anything
        return
    for metric in extra:
        if metric.name in names:
            raise ConfigError(f"the metric '{metric.name}' is always recorded; choose another name")
        if metric.per_row is not None:
            metric.rows(output, target)


def check_fit(problem: Problem, params: Params, data: ClientData, x: Design, y: Tensor) -> None:
    """Reject data that the problem cannot train on, if it has a `check_data`.

    `x` and `y` are the features and targets of `data` as the model receives them. The check calls
    the model with `params`.
    """
    check_primary_metric(problem, params, x, y)
    check_extra_metrics(problem, params, x, y)
    check: Callable[[Params, Design, Tensor], None] | None = getattr(problem, "check_data", None)
    if check is None:
        return
    try:
        check(params, x, y)
    except RowError as error:
        wrong, faults = np.zeros(len(y), bool), []
        wrong[error.rows] = True
        for part in map(Ragged.of, (data.train, data.validation, data.test)):
            positions = np.flatnonzero(wrong[part.values])
            if len(positions):
                owner = data.first + int(part.owners()[positions[0]])
                faults.append((owner, int(part.values[positions[0]])))
        if faults:  # rows that no client owns do not matter
            client, row = min(faults)
            raise DataError(f"client {client} has {error.describe(row)}") from None
