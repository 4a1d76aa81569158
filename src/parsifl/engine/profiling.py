"""Time of a round by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from parsifl.engine.record import RoundRecord

ONCE = "count-once"
"""The phase in which the operations of a new kind of client work are counted, once."""


@final
class PhaseTimer:
    """A stopwatch: each lap belongs to a phase, so the phases add up to the whole.

    >>> laps = PhaseTimer()
    >>> laps.lap("draw")
    >>> list(laps.seconds)
    ['draw']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        self.share({phase: 1.0})

    def share(self, parts: Mapping[str, float]) -> None:
        """Divide the time since the last lap among several phases, in the given proportions.

        Concurrent jobs accumulate more CPU time than wall time, so only proportions are used.
        """
        now = time.perf_counter()
        passed, total = now - self._last, sum(parts.values())
        for phase, part in parts.items():
            share = passed * part / total if total else passed / len(parts)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + share
        self._last = now


def profile(records: Iterable[RoundRecord]) -> dict[str, float]:
    """Return the seconds of all rounds by phase, the longest first."""
    total: dict[str, float] = {}
    for record in records:
        for phase, seconds in record.seconds.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
