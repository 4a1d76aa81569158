"""Budgets of devices, and the design of their masks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup
from parsifl.masks import heuristics, optimal
from parsifl.masks.instance import instance_of, is_number

Design = Literal["optimal", "sequential", "random"]
Objective = Literal["J", "bias"]
Masks = NDArray[np.bool_]

_NODES = 50  # of a program: a plan within seconds, and the same one on every run


def budget_of(info: ClientInfo, total: int) -> float:
    """Return psi_n, the number of parameters that a device may train.

    A budget up to 1 is a fraction of the `total` parameters of the body, a larger one a number
    of parameters; a device that names none trains everything.

    >>> budget_of(ClientInfo(0, 10, {"budget": 0.25}), 400)
    100.0
    >>> budget_of(ClientInfo(0, 10, {"budget": 300}), 400), budget_of(ClientInfo(0, 10), 400)
    (300.0, 400.0)
    """
    budget = info.profile.get("budget")
    if budget is None:
        return float(total)
    if not is_number(budget) or budget < 0:
        raise ConfigError(
            f"the budget of client {info.id} is {budget!r}; a budget is a fraction of the body "
            "(0 to 1) or a number of parameters (above 1)"
        )
    return float(budget * total if budget <= 1 else min(budget, total))


def design_masks(
    blocks: Sequence[LayerGroup],
    clients: Sequence[ClientInfo],
    design: Design,
    objective: Objective,
    key: Key,
) -> Masks:
    """Return which blocks each device trains [N, L], within its budget."""
    total = sum(block.size for block in blocks)
    budgets = [budget_of(info, total) for info in clients]
    everything = np.ones((len(budgets), len(blocks)), dtype=np.bool_)
    if min(budgets) >= total:
        return everything
    instance = instance_of(blocks, budgets)
    if not instance.active().any():
        return ~everything
    if design == "sequential":
        return heuristics.sequential(instance)
    if design == "random":
        return heuristics.random(instance, key)
    return optimal(blocks, budgets, objective, nodes=_NODES).masks


def tell_gaps(masks: Masks, clients: Sequence[ClientInfo], names: Sequence[str]) -> None:
    """Warn of devices without a layer and of layers without a device; refuse an idle fleet."""
    if not masks.any():
        raise ConfigError(
            "no device can train any layer: all budgets are below the smallest layer; raise them"
        )
    idle = [str(clients[int(row)].id) for row in np.flatnonzero(~masks.any(axis=1))]
    if idle:
        warnings.warn(
            f"client {', '.join(idle[:10])}{' and others' if len(idle) > 10 else ''} can train no "
            "layer: the budget is below the smallest; raise it, or the client only fine-tunes",
            stacklevel=2,
        )
    bare = [names[int(column)] for column in np.flatnonzero(~masks.any(axis=0))]
    if bare:
        warnings.warn(
            f"no device trains layer {', '.join(bare)}: it keeps its initial value; raise the "
            "largest budgets",
            stacklevel=2,
        )


def compressed(masks: Masks) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the distinct masks as tuples of block numbers, and which of them each device has.

    >>> compressed(np.array([[True, False], [True, True], [True, False]]))
    (((0,), (0, 1)), (0, 1, 0))
    """
    numbers: dict[tuple[int, ...], int] = {}
    chosen = []
    for row in masks:
        mask = tuple(int(index) for index in np.flatnonzero(row))
        chosen.append(numbers.setdefault(mask, len(numbers)))
    return tuple(numbers), tuple(chosen)
