"""What every client does with a request, whatever it does to answer it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from parsifl.flower.logs import node_log
from parsifl.flower.message import Envelope
from parsifl.flower.transport import Kind


class Answering(Protocol):
    """A client that answers requests."""

    def answer(self, kind: Kind, envelope: Envelope, /) -> Envelope:
        """Reply to a request of this kind; what it carries is not read."""
        ...


def respond(client: Answering, kind: Kind, envelope: Envelope) -> Envelope:
    """Answer a request and the one that it carries, which comes first: training moves the state."""
    asked = envelope.carried
    carried = None if asked is None else answered(lambda: client.answer("evaluate", asked))
    reply = answered(lambda: client.answer(kind, envelope))
    return replace(reply, carried=carried)


def answered(answer: Callable[[], Envelope]) -> Envelope:
    """Return the reply; a failure becomes a reply with its code, the type of the exception.

    The text of an exception may hold values, paths or names. It stays in the node's log.
    """
    try:
        return answer()
    except Exception as error:
        node_log().exception("a request could not be answered")
        code = type(error).__name__
        known = re.fullmatch(r"[A-Za-z_]\w{0,99}", code, re.A)
        return Envelope(json.dumps({"error": code if known else "Error"}))
