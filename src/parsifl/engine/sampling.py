"""Which clients take part in a round."""

from __future__ import annotations

import numpy as np

from parsifl.errors import ConfigError
from parsifl.keys import Key


def cohort_size(clients: int, participation: float) -> int:
    """Return how many of the clients take part: a fraction, but at least one."""
    if not 0 < participation <= 1:
        raise ConfigError(f"participation must be above 0 and at most 1, got {participation}")
    return max(1, round(clients * participation))


def choose(clients: int, participation: float, key: Key) -> list[int]:
    """Draw a cohort without replacement, ascending; its cost follows the cohort, not the crowd.

    >>> choose(5, 1.0, Key(0))
    [0, 1, 2, 3, 4]
    """
    size = cohort_size(clients, participation)
    if size == clients:
        return list(range(clients))
    drawn = key.at(purpose="cohort").numpy().choice(clients, size, replace=False, shuffle=False)
    return [int(client) for client in np.sort(drawn)]
