"""What executors take and give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A client and the trees that the function takes."""

    client: int
    arguments: tuple[Any, ...]


@dataclass
class Outcome:
    """What came of the tasks: results and failures by client, and what was noticed on the way.

    `ordinary` names clients whose results are known to be finite and of ordinary size; of
    the others nothing is known.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    ordinary: set[int] = field(default_factory=set)

    def add(self, other: Outcome) -> None:
        """Take over what came of other tasks."""
        self.results.update(other.results)
        self.failures.update(other.failures)
        self.fallbacks += other.fallbacks
        self.blocks += other.blocks
        self.ordinary |= other.ordinary


def run_alone(function: Callable[..., Any], task: Task, outcome: Outcome) -> None:
    """Run one task; if it raises, its client is named and the others go on."""
    try:
        outcome.results[task.client] = function(*task.arguments)
    except Exception as error:  # one client must not stop the round
        outcome.failures[task.client] = reason(error)


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
