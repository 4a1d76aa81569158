"""Client state on the client's own disk, one file per version; the server names the valid one.

Version n is the state after round n. A server that has accepted a client's work acknowledges its
round, and every later message names the last acknowledged version: the client starts from exactly
that one, so a lost reply, a retried round or a resumed server changes nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import CheckpointError, WireError
from parsifl.engine.safe_files import reject_links, write_synced

_NAME = re.compile(r"round-(\d{8,})\.state")
_LARGEST = 1 << 34
_EXPERIMENT = re.compile(r"[0-9a-f]{32}")


class LostState(CheckpointError):
    """The version of a client's state that the server names is missing or damaged."""


class ClientStates:
    """The versions of one client's state in one experiment.

    Parameters
    ----------
    root
        The node's folder for state. It holds personal models, so only the owner may read it.
    experiment
        32 hexadecimal digits, drawn by the server.
    kind
        The type of the state (see `algorithm.message_types`).
    """

    def __init__(self, root: Path, experiment: str, client: int, kind: Any) -> None:
        if not _EXPERIMENT.fullmatch(experiment):
            # it becomes the name of a folder: nothing else may come from the network
            raise WireError(f"experiment: {experiment!r:.40} is not 32 hexadecimal digits")
        self._folder = root / experiment / f"client-{client}"
        self._client, self._kind = client, kind
        self._stateless = kind is type(None)

    def load(self, version: int) -> Any:
        """Return a version of the state; version 0 is no state yet."""
        if self._stateless or version == 0:
            return None
        path = self._path(version)
        try:
            state = wire.decode(path.read_bytes(), self._kind, limit=_LARGEST)
        except FileNotFoundError:
            raise LostState(
                f"client {self._client} has no state of round {version} in {self._folder}: restore "
                "the directory, or start a new run"
            ) from None
        except (OSError, WireError) as error:
            raise LostState(f"the client state {path} cannot be read ({error})") from error
        # a copy: memory that is aligned as in a run in one process gives the same bits
        return tree.map(_copy, state)

    def save(self, version: int, state: Any) -> None:
        """Write a version; when this returns it survives a crash."""
        if self._stateless:
            return
        reject_links(self._folder, self._folder.parent)
        make_private(self._folder)
        final = self._path(version)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        write_synced(temporary, wire.encode(state), 0o600)
        temporary.replace(final)
        _sync(self._folder)

    def versions(self) -> list[int]:
        """Return the versions on disk, ascending."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def forget(self, accepted: int, oldest: int, newest: int) -> None:
        """Delete the versions that the server cannot ask for.

        No checkpoint on its disk names a version before `oldest`. Versions between `accepted` and
        `newest` were sent and never accepted.
        """
        for version in self.versions():
            if version < min(oldest, accepted) or accepted < version < newest:
                self._path(version).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"round-{version:08d}.state"


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, readable by their owner alone."""
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format)
