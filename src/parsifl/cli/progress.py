"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from parsifl.engine.record import RoundRecord

Show = Callable[["RoundRecord"], None]
_PLAIN_SECONDS = 5.0
_LARGE = 1e6
"""From this score on, an exponent is shorter."""


@contextmanager
def follow(label: str, rounds: int, *, quiet: bool = False) -> Iterator[Show]:
    """Yield a function that takes the record of each finished round and shows the progress.

    Clients that are dropped are reported even if `quiet`, once per client.
    """
    if quiet:
        yield _naming_dropped(lambda _: None)
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(label, total=rounds, score="")
            yield _naming_dropped(
                lambda record: bar.update(task, completed=record.round, score=score(record))
            )
    else:
        yield _naming_dropped(_plain(label, rounds))


def _naming_dropped(show: Show) -> Show:
    named: set[int] = set()

    def show_dropped(record: RoundRecord) -> None:
        for client, reason in record.dropped.items():
            if client not in named:
                named.add(client)
                text = f"client {client} was dropped in round {record.round}: {reason}"
                sys.stderr.write(f"warning: {text}\n")
        show(record)

    return show_dropped


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def _plain(label: str, rounds: int) -> Show:
    shown = time.monotonic()

    def show(record: RoundRecord) -> None:
        nonlocal shown
        last = record.round == rounds
        if last or time.monotonic() - shown >= _PLAIN_SECONDS:
            shown = time.monotonic()
            text = f"{label}: round {record.round} of {rounds} {score(record)}\n"
            sys.stderr.write(text)
            sys.stderr.flush()

    return show


def score(record: RoundRecord) -> str:
    """Return the scores of a record as a short text."""
    words = []
    for model in ("global", "personal"):
        for split in ("test", "validation"):
            metrics = record.scores.get(model, {}).get(split)
            if metrics:
                name, values = next(iter(metrics.items()))
                mean = values["mean"]
                number = f"{mean:.4f}" if abs(mean) < _LARGE else f"{mean:.4g}"
                words.append(f"{model} {name} {number}")
                break
    return ", ".join(words)
