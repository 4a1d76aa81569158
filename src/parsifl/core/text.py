"""Text from files and from other machines, made safe for a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Replace everything that a terminal would interpret instead of showing; line breaks stay.

    These are control characters, surrogates and directional marks. A run directory or a message
    may be crafted.

    >>> visible("lost\x1b[2J\nround 2 is done")
    'lost?[2J\nround 2 is done'
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
