"""Atomic checkpoints: safetensors for the numbers, JSON for their structure, no pickle.

A checkpoint is a folder that is written under a temporary name, synced, and renamed; then the file
LATEST is replaced to name it, with a checksum. Whenever the process is killed, LATEST names a
whole checkpoint. The states of clients are in files beside it (see `engine.shelf`), which it names
with their checksums: only what has changed since the checkpoint before is written.

The last two checkpoints are kept, and LATEST lists them, newest first: one that was damaged
afterwards is rejected in favour of the one before. Nothing is deleted but what a checkpoint
consists of, and symbolic links are rejected.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from parsifl.core import tree, tree_schema
from parsifl.core.algorithm import TreeTypes
from parsifl.core.errors import CheckpointError
from parsifl.engine.owned import reject_links, remove_directory, replace_file, write_synced
from parsifl.engine.segment_store import SegmentStore, as_os_error, checksum
from parsifl.engine.state_store import StateStore

_LATEST = "LATEST"
_CLIENTS = "clients"
_FILES = ("state.json", "server.safetensors")
_NAME = re.compile(r"(\.)?round-\d{8,}(?(1)\.tmp)")
_LINE = re.compile(r"(round-\d{8,}) ([0-9a-f]{8})")
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a run: the state after `round` rounds, and running totals."""

    round: int
    server: Any
    clients: Mapping[int, Any]
    totals: dict[str, Any]


def save(folder: Path, round: int, server: Any, store: StateStore, totals: dict[str, Any]) -> None:
    """Write a checkpoint, make it the latest one, and keep the one before."""
    reject_links(folder, folder / _LATEST, folder / _CLIENTS)
    name = f"round-{round:08d}"
    temporary, final = folder / f".{name}.tmp", folder / name
    earlier = [(old, line) for old, line in _listed(folder) if old != name][: _KEPT - 1]
    _make_room(temporary)
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
    _make_room(final)
    temporary.rename(final)
    lines = [f"{name} {_checksum(final)}", *(line for _, line in earlier)]
    replace_file(folder / _LATEST, "\n".join(lines).encode())
    kept = {name, *(old for old, _ in earlier)}
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in kept:
            remove_directory(path, _FILES)
    shelf.sweep({part for old, _ in earlier for part in _parts(folder / old)})


def clients_folder(folder: Path) -> Path:
    """Return where the client states of a folder of checkpoints are."""
    return folder / _CLIENTS


def load(folder: Path, types: TreeTypes) -> Checkpoint | None:
    """Read the latest checkpoint; None if there is none.

    If it is damaged, the one before is read with a warning, and is the latest from then on.
    """
    reject_links(folder, folder / _LATEST, folder / _CLIENTS)
    if not (folder / _LATEST).exists():
        return None
    lines = (folder / _LATEST).read_text(errors="replace").splitlines() or [""]
    failures: list[tuple[Path, Exception]] = []
    for at, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        place = folder / (match[1] if match else _LATEST)
        try:
            if match is None:
                raise ValueError("it does not name a checkpoint with its checksum")
            found = _read(folder, place, match[2], types)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            failures.append((place, error))
            continue
        if failures:
            bad, reason = failures[0]
            warnings.warn(
                f"the checkpoint {bad} cannot be read ({reason}); resuming from the one before, "
                f"{place}",
                stacklevel=2,
            )
            replace_file(folder / _LATEST, "\n".join(lines[at:]).encode())
        return found
    bad, reason = failures[0]
    raise CheckpointError(
        f"the checkpoint {bad} cannot be read ({reason}); restore it from a copy, or delete the "
        "run folder to start from the beginning"
    ) from reason


def _read(folder: Path, place: Path, expected: str, types: TreeTypes) -> Checkpoint:
    reject_links(place, *(place / name for name in _FILES))
    if _checksum(place) != expected:
        raise ValueError("its checksum does not agree")
    state = json.loads((place / "state.json").read_text())
    server_leaves = load_file(place / "server.safetensors")
    server = _rebuild(state["server"], types.server, server_leaves)
    clients = SegmentStore.open(folder / _CLIENTS, state["clients"], types.client)
    return Checkpoint(state["round"], server, clients, state["totals"])


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Return the checkpoints that LATEST lists, newest first, each with its whole line."""
    try:
        text = (folder / _LATEST).read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return [(match[1], match[0]) for match in found if match]


def _parts(place: Path) -> list[str]:
    """Return the files of client states that a checkpoint needs; none if it cannot be read."""
    try:
        return [str(name) for name, *_ in json.loads((place / "state.json").read_text())["clients"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _make_room(place: Path) -> None:
    """Delete what an interrupted `save` left behind."""
    remove_directory(place, _FILES)
    if place.exists() or place.is_symlink():
        raise CheckpointError(
            f"{place} is in the way of a checkpoint and was not written by Parsifl; move it, and "
            "resume the run"
        )


def _rebuild(description: Any, hint: Any, leaves: Mapping[str, Any]) -> Any:
    structure = tree_schema.from_json(description, hint)
    count = len(tree.names(structure))
    # copies: memory that is aligned as in a run that was not interrupted gives the same bits
    return tree.unflatten([leaves[str(i)].clone() for i in range(count)], structure)


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    # clones: safetensors refuses tensors that share memory
    owned = {name: value.contiguous().clone() for name, value in tensors.items()}
    with as_os_error(path):
        save_file(owned, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _checksum(place: Path) -> str:
    return checksum(*(place / name for name in _FILES))
