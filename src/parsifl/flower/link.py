"""How the server reaches its nodes: the few things that it needs of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from parsifl.flower.letter import Letter

Kind = Literal["hello", "train", "judge", "agree", "products"]


class Link(Protocol):
    """A network of nodes, each of which answers letters for one client."""

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        ...

    def ask(
        self, kind: Kind, letters: Mapping[int, Letter], timeout: float
    ) -> dict[int, Letter | str]:
        """Send letters and wait for the answers, at most `timeout` seconds.

        A node that failed has a text that says how; one that did not answer is missing.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...
