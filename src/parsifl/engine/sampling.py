"""Sampling of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.engine.settings import Evaluation


def cohort_size(clients: int, participation: float) -> int:
    """Return how many clients take part: a fraction, but at least one."""
    return max(1, round(clients * participation))


def choose(clients: int, participation: float, key: Key) -> list[int]:
    """Draw a cohort without replacement, ascending, at a cost that depends on the cohort only.

    >>> choose(5, 1.0, Key(0))
    [0, 1, 2, 3, 4]
    """
    size = cohort_size(clients, participation)
    if size == clients:
        return list(range(clients))
    (generator,) = key.replace(purpose="cohort").generators([key.client])
    drawn = generator.choice(clients, size, replace=False, shuffle=False)
    return sorted(drawn.tolist())


def eligible_clients(clients: int, evaluation: Evaluation, key: Key) -> Sequence[int]:
    """Return the clients that may be sampled; the unseen ones are drawn once, by the seed."""
    unseen = round(clients * evaluation.unseen)
    if evaluation.clients == "unseen" and not unseen:
        raise ConfigError("clients='unseen' needs Evaluation(unseen=...) above 0")
    if unseen >= clients:
        raise ConfigError(f"unseen={evaluation.unseen} leaves no client to train")
    if not unseen:
        return range(clients)
    drawn = key.replace(purpose="unseen").numpy_generator().permutation(clients)[unseen:]
    return [int(client) for client in np.sort(drawn)]


def cohort(eligible: Sequence[int], participation: float, key: Key) -> list[int]:
    """Draw the eligible clients that upload in the round of the key, ascending."""
    return [eligible[position] for position in choose(len(eligible), participation, key)]


def evaluated(
    evaluation: Evaluation, clients: int, eligible: Sequence[int], sampled: set[int]
) -> Sequence[int]:
    """Return the clients to evaluate, ascending."""
    if evaluation.clients == "sampled":
        return sorted(sampled)
    if evaluation.clients == "unseen":
        return sorted(set(range(clients)) - set(eligible))
    return range(clients)
