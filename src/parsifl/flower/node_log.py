"""The log of a node: the only place for texts that may name rows, paths or values."""

from __future__ import annotations

import logging


def node_log() -> logging.Logger:
    """Return the logger `parsifl`, enabled.

    Flower configures logging when it opens its database, and that disables every logger that
    already exists in the process. What a node withholds from the network must still be logged.
    """
    logger = logging.getLogger("parsifl")
    logger.disabled = False
    return logger
