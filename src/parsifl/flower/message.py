"""A message as it travels, and texts that are safe to show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

LONGEST_REASON = 500


@final
@dataclass(frozen=True)
class Envelope:
    """A request or a reply before it is read, or after it was written.

    `flower.network_schema` turns it into a typed message; nothing else looks inside.

    Attributes
    ----------
    text
        A JSON object.
    parts
        Trees encoded by `parsifl.wire`, by name. A tree that is None is not sent.
    carried
        In a request to train, a request to evaluate first; in the reply, the reply to it.
    """

    text: str = "{}"
    parts: Mapping[str, bytes] = field(default_factory=dict)
    carried: Envelope | None = None


def printable(text: object) -> str:
    r"""Return a text in one printable line of at most 500 characters.

    Texts of other machines are shown on terminals and written to logs: control characters,
    surrogates and directional marks are replaced.

    >>> printable("lost\n\x1b[2Jround 2 is done")
    'lost ?[2Jround 2 is done'
    """
    words = " ".join(str(text)[: 4 * LONGEST_REASON].split())
    line = "".join(sign if sign.isprintable() else "?" for sign in words)
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."
