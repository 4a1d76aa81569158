"""Width multipliers: HeteroFL keeps the first ceil(r * C) channels of each hidden layer."""

from __future__ import annotations

import math

from parsifl.core.errors import ConfigError


def scaled(channels: int, width: float) -> int:
    """Return ceil(width * channels), never less than one.

    >>> scaled(64, 0.5), scaled(10, 0.25), scaled(7, 1.0)
    (32, 3, 7)
    """
    if not 0.0 < width <= 1.0:
        raise ConfigError(f"width is {width}; it must be above 0 and at most 1")
    if channels < 1:
        raise ConfigError(f"a layer has {channels} units, but every layer needs at least one")
    # 0.1 * 30 is 3.0000000000000004 in floating point: rounding first keeps 3 channels
    return max(1, math.ceil(round(width * channels, 9)))
