"""The logs of server and nodes: text, or JSON lines with run, round and client.

Only the log of a node may contain messages that name rows, paths or values. Set
`PARSIFL_LOG=json` in the environment of a process to get JSON lines on its standard error.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from parsifl.core.text import visible

VARIABLE = "PARSIFL_LOG"
_FIELDS = ("run", "round", "client", "node")
_context: ContextVar[dict[str, Any] | None] = ContextVar("parsifl_log", default=None)


def node_log() -> logging.Logger:
    """Return the logger `parsifl`, enabled.

    Flower configures logging when it opens its database, and that disables every logger that
    already exists in the process. Details that a node does not send must still be logged.
    """
    logger = logging.getLogger("parsifl")
    logger.disabled = False
    if is_json() and not any(isinstance(h.formatter, JsonFormatter) for h in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def server_log(text: str) -> None:
    """Log progress of the server: as JSON if requested, else in Flower's log.

    The text may come from other machines.
    """
    (node_log() if is_json() else logging.getLogger("flwr")).info(visible(text))


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Append what the server logs to a file too, while the block runs."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if is_json() else text)
    loggers = (node_log(), logging.getLogger("flwr"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def is_json() -> bool:
    """Return whether logs are JSON lines."""
    return os.environ.get(VARIABLE, "").lower() == "json"


def note_context(**values: Any) -> None:
    """Set the context of the following lines of this thread: run, round, client, node."""
    _context.set({**(_context.get() or {}), **values})


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        context = _context.get() or {}
        line |= {name: context[name] for name in _FIELDS if name in context}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
