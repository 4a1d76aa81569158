"""Keeps traces of modules apart from their calls.

`torch.fx` patches `nn.Module` while it traces: another thread's call would be traced as well, so
a gate keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class _Gate:
    """Lets calls pass together, and a trace alone."""

    def __init__(self) -> None:
        self._calls, self._condition = 0, Condition()

    def enter(self) -> None:
        """Begin the call of a module; waits for a trace to end."""
        with self._condition:
            self._calls += 1

    def leave(self) -> None:
        """End the call of a module."""
        with self._condition:
            self._calls -= 1
            if not self._calls:
                self._condition.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait for the calls under way, and let no other begin."""
        with self._condition:
            self._condition.wait_for(lambda: not self._calls)
            yield


GATE = _Gate()
