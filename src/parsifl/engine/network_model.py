"""Simulated seconds: what a round would take on a given network and given devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from parsifl.core import config
from parsifl.core.config import NonNegative, Positive


@final
@dataclass(frozen=True)
class NetworkModel:
    """A link between server and clients.

    Parameters
    ----------
    latency
        Seconds for a message to arrive, each way; where nothing is sent there is none.
    up, down
        Bytes a second; None: no limit.

    Examples
    --------
    >>> NetworkModel(latency=0.15, up=1e6).seconds(up=1_000_000, down=0, flops=None, profile={})
    1.15
    """

    latency: NonNegative = 0.0
    up: Positive | None = None
    down: Positive | None = None

    def __post_init__(self) -> None:
        config.check(self)

    def seconds(self, up: int, down: int, flops: int | None, profile: Any) -> float:
        """Return the seconds of one client's round; computing counts if the device is known."""
        speed = profile.get("flops_per_second")
        computing = flops / speed if flops is not None and speed else 0.0
        sending = up / (self.up or math.inf) + down / (self.down or math.inf)
        messages = (up > 0) + (down > 0)
        return messages * self.latency + sending + computing
