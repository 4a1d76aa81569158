"""How the server reaches its nodes: the few things that it needs of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from parsifl.flower.message import Letter

Kind = Literal["hello", "train", "evaluate", "agree", "products"]


Answers = dict[int, Letter | str]
"""What nodes answered, by node; a text says how a node failed."""


class Link(Protocol):
    """A network of nodes, each of which answers letters for one client."""

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        ...

    def ask(
        self,
        kind: Kind,
        letters: Mapping[int, Letter],
        timeout: float,
        enough: Callable[[Answers], bool] | None = None,
    ) -> Answers:
        """Send letters and wait for the answers: of all, or until there are `enough`.

        After `timeout` seconds a node that did not answer is missing.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...
