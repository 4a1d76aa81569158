"""Client state between rounds: in memory up to a limit, the rest on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.engine.segment_store import SegmentStore

LIMIT = 2 << 30
"""Most bytes of client state in memory."""
_LEFT = 0.75  # of the limit stays in memory when states move to disk: they move many at a time


class StateStore:
    """Keeps the state of every client that has trained; the others are made when first needed.

    The states that were written last are in memory. Reading does not count: an evaluation
    reads every client once, and would evict those that train.

    Parameters
    ----------
    limit
        Most bytes of states in memory.
    folder
        Where the others go; None: a temporary folder (see `tempfile.gettempdir`).
    """

    def __init__(self, limit: int = LIMIT, folder: Path | None = None) -> None:
        self._limit, self._folder = limit, folder
        self._recent: dict[int, Any] = {}
        self._held = 0
        self._changed: set[int] = set()  # newer in memory than on disk
        self._shelf: SegmentStore | None = None

    @property
    def held(self) -> int:
        """The bytes of the states that are in memory."""
        return self._held

    def load(self, client: int, make: Callable[[], Any]) -> Any:
        """Return a client's state, or make (and do not keep) its first one."""
        if client in self._recent:
            return self._recent[client]
        if self._shelf is not None and client in self._shelf:
            return self._shelf[client]
        return make()

    def save(self, client: int, state: Any) -> None:
        """Keep a copy: results of a batch are views of memory that is larger than one client.

        Copies are contiguous, as a checkpoint gives them back: the layout may decide the last bit.
        """
        if state is None and self._recent.get(client, self) is None:
            return  # nothing to keep, and known: it is not written again
        self._forget(client)
        self._recent[client] = tree.map(_contiguous_copy, state)
        self._held += _bytes(state)
        self._changed.add(client)
        if self._held > self._limit:
            self._spill()

    def _forget(self, client: int) -> None:
        if client in self._recent:
            self._held -= _bytes(self._recent.pop(client))
        self._changed.discard(client)

    def _spill(self) -> None:
        """Move the states that were written longest ago to disk."""
        left, moving = self._held, []
        for client, state in self._recent.items():
            if left <= _LEFT * self._limit:
                break
            left -= _bytes(state)
            moving.append(client)
        if self._shelf is None:
            self._shelf = SegmentStore(self._folder or self._temporary())
        self._shelf.write((i, self._recent[i]) for i in moving if i in self._changed)
        for client in moving:
            self._forget(client)
        if self._folder is None:  # no checkpoint needs what is out of date
            self._shelf.compact()
            self._shelf.delete_stale()

    def _temporary(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="parsifl-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def restore(self, states: Mapping[int, Any]) -> None:
        """Replace everything that is kept; what is on a shelf stays there until it is needed."""
        self._recent, self._held, self._changed, self._shelf = {}, 0, set(), None
        if isinstance(states, SegmentStore):
            self._shelf, self._folder = states, states.folder
        else:
            for client, state in states.items():
                self.save(client, state)

    def flush_to(self, folder: Path) -> SegmentStore:
        """Write everything that is not yet there to a folder, and keep states there from now on."""
        if self._shelf is None or self._shelf.folder != folder:
            shelf = SegmentStore(folder)
            shelf.write(iter(self))
            self._shelf, self._folder = shelf, folder
        else:
            self._shelf.write((client, self._recent[client]) for client in sorted(self._changed))
        self._changed.clear()
        self._shelf.compact()
        return self._shelf

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((i, self.load(i, lambda: None)) for i in sorted(self._ids()))

    def __len__(self) -> int:
        return len(self._ids())

    def _ids(self) -> set[int]:
        return {*self._recent, *(self._shelf or ())}


def _contiguous_copy(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def _bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(state))
