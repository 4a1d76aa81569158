"""Atomic checkpoints: safetensors for the numbers, JSON for their structure, no pickle.

A checkpoint is a folder that is written under a temporary name, synced, and renamed; then the file
LATEST is replaced to name it, with a checksum. Whenever the process is killed, LATEST names a
whole checkpoint; one that was damaged afterwards is refused. The states of clients are in files
beside it (see `engine.shelf`), which it names with their checksums: only what has changed since
the checkpoint before is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from parsifl.core import tree, tree_schema
from parsifl.core.algorithm import TreeTypes
from parsifl.core.errors import CheckpointError
from parsifl.engine.segment_store import SegmentStore, checksum, write_synced
from parsifl.engine.state_store import StateStore

_LATEST = "LATEST"
_CLIENTS = "clients"
_FILES = ("state.json", "server.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a run: the state after `round` rounds, and running totals."""

    round: int
    server: Any
    clients: Mapping[int, Any]
    totals: dict[str, Any]


def save(folder: Path, round: int, server: Any, store: StateStore, totals: dict[str, Any]) -> None:
    """Write a checkpoint and make it the latest one."""
    name = f"round-{round:08d}"
    temporary, final = folder / f".{name}.tmp", folder / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    leaves, structure = tree.flatten(server)
    _write_tensors(temporary / "server.safetensors", {str(i): v for i, v in enumerate(leaves)})
    shelf = store.settle(folder / _CLIENTS)
    state = {
        "round": round,
        "server": tree_schema.to_json(structure),
        "clients": shelf.seal(),
        "totals": totals,
    }
    write_synced(temporary / "state.json", json.dumps(state).encode())
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    replace_file(folder / _LATEST, f"{name} {_checksum(final)}".encode())
    for old in folder.iterdir():
        if old.name not in (name, _LATEST, _CLIENTS):
            shutil.rmtree(old, ignore_errors=True)
    shelf.sweep()


def clients_folder(folder: Path) -> Path:
    """Return where the client states of a folder of checkpoints are."""
    return folder / _CLIENTS


def load(folder: Path, types: TreeTypes) -> Checkpoint | None:
    """Read the latest checkpoint; None if there is none."""
    if not (folder / _LATEST).exists():
        return None
    place = folder
    try:
        name, checksum = (folder / _LATEST).read_text().split()
        place = folder / name
        if _checksum(place) != checksum:
            raise ValueError("its checksum does not agree")
        state = json.loads((place / "state.json").read_text())
        server_leaves = load_file(place / "server.safetensors")
        server = _rebuild(state["server"], types.server, server_leaves)
        clients = SegmentStore.open(folder / _CLIENTS, state["clients"], types.client)
        return Checkpoint(state["round"], server, clients, state["totals"])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {place} cannot be read ({error}); delete the run folder to start anew"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, content)
    temporary.replace(path)


def _rebuild(description: Any, hint: Any, leaves: Mapping[str, Any]) -> Any:
    structure = tree_schema.from_json(description, hint)
    count = len(tree.names(structure))
    # copies: memory that is aligned as in a run that was not interrupted gives the same bits
    return tree.unflatten([leaves[str(i)].clone() for i in range(count)], structure)


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    # clones: safetensors refuses tensors that share memory
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _checksum(place: Path) -> str:
    return checksum(*(place / name for name in _FILES))
