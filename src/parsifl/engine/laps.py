"""Where the time of a round goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, final


@final
class Laps:
    """A stop watch: each lap goes to a phase, so that the phases add up to the whole.

    >>> laps = Laps()
    >>> laps.lap("draw")
    >>> list(laps.seconds)
    ['draw']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def profile(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of all rounds by phase, the longest first.

    >>> profile([{"seconds": {"draw": 1.0, "local": 2.0}}, {"seconds": {"local": 2.0}}])
    {'local': 4.0, 'draw': 1.0}
    """
    total: dict[str, float] = {}
    for record in records:
        for phase, seconds in record["seconds"].items():
            total[phase] = total.get(phase, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
