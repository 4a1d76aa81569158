"""The exceptions that Parsifl raises.

A message says what was wrong, what was expected, and what to do::

    ParsiflError
    +-- ConfigError        a setting that cannot work (unknown name, wrong type, impossible value)
    +-- DataError          data that are missing, malformed, not finite, or too few
    +-- CapabilityError    an algorithm needs something that the problem does not provide
    +-- WireError          bytes that are not a valid message
    +-- CheckpointError    a run directory that cannot be read, or that belongs to another run
    +-- ClientError        work that failed on one client (names stage, client and round)

Warnings are `ParsiflWarning`; `DroppedClientWarning` names a client that was left out of a round,
and `DivergenceWarning` reports a model that has grown without bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ParsiflError(Exception):
    """Base of all errors for the user."""


class ParsiflWarning(UserWarning):
    """Base of all warnings for the user."""


class DroppedClientWarning(ParsiflWarning):
    """A client was left out of a round."""


class DivergenceWarning(ParsiflWarning):
    """A model is finite, but so large that training must have diverged."""


class ConfigError(ParsiflError):
    """A setting is unknown, of the wrong type, or impossible."""


class DataError(ParsiflError):
    """Data are missing, malformed, not finite, or too few."""


class MissingDataError(DataError):
    """Files of a dataset are not on this machine and could not be downloaded."""


class RowError(DataError):
    """Some rows are invalid. The caller adds the client to the message.

    Attributes
    ----------
    rows
        The numbers of these rows, ascending.
    describe
        Returns the problem with a row: "label 5, but ...".
    """

    def __init__(self, rows: Sequence[int], describe: Callable[[int], str]) -> None:
        super().__init__(f"row {rows[0]} has {describe(rows[0])}")
        self.rows, self.describe = rows, describe


class CapabilityError(ParsiflError):
    """An algorithm needs something that this problem does not provide."""


class WireError(ParsiflError):
    """Bytes are not a valid message. The error names the field."""


class CheckpointError(ParsiflError):
    """A run directory cannot be read or holds a run of another configuration."""


class ClientError(ParsiflError):
    """Work failed on one client."""

    def __init__(self, stage: str, client: int, round: int, reason: str) -> None:
        super().__init__(f"client {client} failed in {stage} of round {round}: {reason}")
        self.stage, self.client, self.round, self.reason = stage, client, round, reason

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled by its parts, so that it may cross from a worker process
        return type(self), (self.stage, self.client, self.round, self.reason)


def reason(error: Exception) -> str:
    """Return an exception as one line.

    >>> reason(ValueError("no"))
    'ValueError: no'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question that names the nearest match; empty if no name is near.

    >>> did_you_mean("int9", ["exact", "int8"])
    "did you mean 'int8'?"
    """
    close = difflib.get_close_matches(str(name).lower(), sorted(known), n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest match or all known names.

    >>> unknown("algorithm", "fedavgg", ["fedavg", "ditto"])
    "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"
    """
    names = sorted(known)
    hint = did_you_mean(name, names) or "known: " + ", ".join(names)
    return f"unknown {kind} '{name}'; {hint}"
