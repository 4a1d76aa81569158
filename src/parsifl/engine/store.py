"""Client state between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parsifl import tree


def _contiguous_copy(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


class ClientStore:
    """Keeps the state of every client that has trained; the others are made when first needed."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def load(self, client: int, make: Callable[[], Any]) -> Any:
        """Return a client's state, or make (and do not keep) its first one."""
        return self._states[client] if client in self._states else make()

    def save(self, client: int, state: Any) -> None:
        """Keep a copy: results of a batch are views of memory that is larger than one client.

        Copies are contiguous, as a checkpoint gives them back: the layout may decide the last bit.
        """
        self._states[client] = tree.map(_contiguous_copy, state)

    def restore(self, states: dict[int, Any]) -> None:
        """Replace everything that is kept."""
        self._states = dict(states)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(sorted(self._states.items()))

    def __len__(self) -> int:
        return len(self._states)
