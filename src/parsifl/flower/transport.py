"""How the server reaches its nodes: the few things that it needs of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from parsifl.flower.message import Envelope

Kind = Literal["hello", "train", "evaluate", "agree", "products"]

Requests = Mapping[int, tuple[Kind, Envelope]]
"""By node."""
Replies = dict[int, Envelope | str]
"""By node; a text is the reason why there is no reply."""


class Link(Protocol):
    """A network of nodes, each of which answers requests for one client."""

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        ...

    def ask(
        self,
        requests: Requests,
        timeout: float,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        """Send requests and wait for the replies: of all nodes, or until there are `enough`.

        After `timeout` seconds a node that did not reply is missing.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...
