"""Checks that data and model fit each other, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl.core.data_trial import FEW, try_predict
from parsifl.core.errors import DataError, RowError
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.linear.design import Design


def stack_clients(
    problem: Problem, clients: Sequence[tuple[Any, Any]], *, test: float
) -> ClientData:
    """Stack a user's list; integers stay integers if the model does not take real numbers."""
    data = ClientData.of(clients, test=test)
    if not _integers(clients[0][0]):
        return data
    params = problem.init(Key(0))
    if isinstance(try_predict(problem, params, data.x[:FEW]), Exception):
        tokens = ClientData.of(clients, test=test, dtype=torch.int64)
        if isinstance(try_predict(problem, params, tokens.x[:FEW]), Tensor):
            return tokens
    return data


def check_fit(problem: Problem, params: Params, data: ClientData, x: Design, y: Tensor) -> None:
    """Reject data that the problem cannot train on, if it has a `check_data`.

    `x` and `y` are the features and targets of `data` as the model is given them; it is tried with
    the parameters `params`.
    """
    check: Callable[[Params, Design, Tensor], None] | None = getattr(problem, "check_data", None)
    if check is None:
        return
    try:
        check(params, x, y)
    except RowError as error:
        wrong, found = np.zeros(len(y), bool), []
        wrong[error.rows] = True
        for part in map(Ragged.of, (data.train, data.validation, data.test)):
            places = np.flatnonzero(wrong[part.values])
            if len(places):
                found.append((int(part.owners()[places[0]]), int(part.values[places[0]])))
        if found:  # rows that no client owns do not matter
            client, row = min(found)
            raise DataError(f"client {client} has {error.describe(row)}") from None


def _integers(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not x.is_floating_point() and x.dtype != torch.bool
    return not hasattr(x, "tocsr") and np.asarray(x).dtype.kind in "iu"
