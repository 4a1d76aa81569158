"""Where the time of a round goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, final

ONCE = "count-once"
"""The phase in which operations are counted where clients do what was not counted before."""


@final
class PhaseTimer:
    """A stop watch: each lap goes to a phase, so that the phases add up to the whole.

    >>> laps = PhaseTimer()
    >>> laps.lap("draw")
    >>> list(laps.seconds)
    ['draw']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap."""
        self.share({phase: 1.0})

    def share(self, parts: Mapping[str, float]) -> None:
        """Book the time since the last lap on several phases, in the given proportions.

        Jobs that run side by side spend more seconds than pass: they tell what on, not how many.
        """
        now = time.perf_counter()
        passed, whole = now - self._last, sum(parts.values())
        for phase, part in parts.items():
            share = passed * part / whole if whole else passed / len(parts)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + share
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
