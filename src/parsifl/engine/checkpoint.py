"""Atomic checkpoints: safetensors for the numbers, JSON for their structure, no pickle.

A checkpoint is a directory that is written under a temporary name, synced and renamed. Then the
file LATEST is replaced to name it, with a checksum. Whenever the process is killed or the machine
loses power, LATEST names a complete checkpoint. The pool writes client states next to the
checkpoint (see `ClientPool.save`); `state.json` records where they are.

The last two checkpoints are kept, and LATEST lists them, newest first. If the latest is damaged,
the previous one is used. Only files of a checkpoint are ever deleted, and symbolic links are
rejected.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from parsifl.core import tree, tree_schema
from parsifl.core.algorithm import TreeTypes
from parsifl.core.errors import CheckpointError
from parsifl.engine.record import RoundRecord
from parsifl.engine.safe_files import (
    make_directory,
    reject_links,
    remove_directory,
    remove_temporary,
    replace_file,
    write_synced,
)
from parsifl.engine.state_store import checksum

_LATEST = "LATEST"
_CLIENTS = "clients"
_FILES = ("state.json", "server.safetensors")
_NAME = re.compile(r"(\.)?round-\d{8,}(?(1)\.tmp)")
_LINE = re.compile(r"(round-\d{8,}) ([0-9a-f]{8})")
_KEPT = 2
FORMAT = 2
"""Format of checkpoints; versions before 0.2 wrote format 1."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `round` rounds.

    `pending` is the last record if its scores have not arrived yet. `metrics` is the length and
    the checksum of metrics.jsonl, if it exists.
    """

    round: int
    server: Any
    pending: RoundRecord | None = None
    metrics: tuple[int, int] | None = None


def save(directory: Path, state: Checkpoint, save_pool: Callable[[Path], dict[str, Any]]) -> None:
    """Write a checkpoint, make it the latest one, and keep the previous one."""
    reject_links(directory, directory / _LATEST, directory / _CLIENTS)
    name = f"round-{state.round:08d}"
    temporary, final = directory / f".{name}.tmp", directory / name
    earlier = [(old, line) for old, line in _listed(directory) if old != name][: _KEPT - 1]
    _make_room(temporary)
    make_directory(temporary)
    leaves, structure = tree.flatten(state.server)
    # clones: safetensors refuses tensors that share memory
    owned = {str(i): leaf.contiguous().clone() for i, leaf in enumerate(leaves)}
    content = {
        "format": FORMAT,
        "round": state.round,
        "server": tree_schema.to_json(structure),
        "pool": save_pool(directory),
        "pending": None if state.pending is None else state.pending.to_json(),
        "metrics": state.metrics,
    }
    contents = dict(zip(_FILES, (json.dumps(content).encode(), save_tensors(owned)), strict=True))
    for file, data in contents.items():
        write_synced(temporary / file, data)
    _make_room(final)
    temporary.rename(final)
    # computed before writing, so that corruption by the disk is detected
    lines = [f"{name} {checksum(*contents.values())}", *(line for _, line in earlier)]
    replace_file(directory / _LATEST, "\n".join(lines).encode())
    remove_temporary(directory)
    needed = {name, *(old for old, _ in earlier)}
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in needed:
            remove_directory(path, _FILES)


def load(
    folder: Path,
    types: TreeTypes,
    restore_pool: Callable[[Path, dict[str, Any]], None] = lambda *_: None,
) -> Checkpoint | None:
    """Read the latest checkpoint and restore the pool from it; None if there is none.

    If it is damaged, the previous one is read with a warning and becomes the latest. If LATEST is
    missing, the checkpoints are left untouched and CheckpointError is raised.
    """
    reject_links(folder, folder / _LATEST, folder / _CLIENTS)
    if not (folder / _LATEST).exists():
        _reject_unlisted(folder)
        return None
    lines = (folder / _LATEST).read_text(errors="replace").splitlines() or [""]
    failures: list[tuple[Path, Exception]] = []
    for at, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        checkpoint_dir = folder / (match[1] if match else _LATEST)
        try:
            if match is None:
                raise ValueError("it does not name a checkpoint with its checksum")
            loaded = _read(folder, checkpoint_dir, match[2], types, restore_pool)
        except (
            OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
            SafetensorError,
        ) as error:  # fmt: skip
            failures.append((checkpoint_dir, error))
            continue
        if failures:
            bad, reason = failures[0]
            warnings.warn(
                f"the checkpoint {bad} cannot be read ({reason}); resuming from the previous one, "
                f"{checkpoint_dir}",
                stacklevel=2,
            )
            replace_file(folder / _LATEST, "\n".join(lines[at:]).encode())
        return loaded
    bad, reason = failures[0]
    raise CheckpointError(
        f"the checkpoint {bad} cannot be read ({reason}); restore it from a copy, or delete the "
        "run directory to start from the beginning"
    ) from reason


def _read(
    folder: Path,
    checkpoint: Path,
    expected: str,
    types: TreeTypes,
    restore_pool: Callable[[Path, dict[str, Any]], None],
) -> Checkpoint:
    reject_links(checkpoint, *(checkpoint / name for name in _FILES))
    if _checksum(checkpoint) != expected:
        raise ValueError("its checksum does not match")
    state = json.loads((checkpoint / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has checkpoint format {state.get('format', 1)}, but this version "
            f"reads format {FORMAT}: resume with the version in environment.json, or choose a new "
            "directory"
        )
    server_leaves = load_file(checkpoint / "server.safetensors")
    server = _rebuild(state["server"], types.server, server_leaves)
    restore_pool(folder, state["pool"])
    pending = None if state["pending"] is None else RoundRecord.from_json(state["pending"])
    length, crc = state["metrics"] or (0, 0)
    metrics = None if state["metrics"] is None else (int(length), int(crc))
    return Checkpoint(int(state["round"]), server, pending, metrics)


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Return the checkpoints that LATEST lists, newest first, each with its whole line."""
    try:
        text = (folder / _LATEST).read_text(errors="replace")
    except FileNotFoundError:
        return []
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    return [(match[1], match[0]) for match in matches if match]


def _reject_unlisted(folder: Path) -> None:
    """Raise CheckpointError if LATEST is missing: a fresh start would delete the checkpoints."""
    rounds = sorted(folder.glob("round-*")) if folder.exists() else []
    if len(rounds) > 1:  # a single one may be a first checkpoint that was interrupted
        raise CheckpointError(
            f"{folder} holds {', '.join(path.name for path in rounds)} but no {_LATEST}; restore "
            "it from a copy, or delete the run directory to start from the beginning"
        )


def _make_room(checkpoint: Path) -> None:
    """Delete the remains of an interrupted `save`."""
    remove_directory(checkpoint, _FILES)
    if checkpoint.exists() or checkpoint.is_symlink():
        raise CheckpointError(
            f"{checkpoint} is in the way of a checkpoint and is not Parsifl's; move it, and "
            "resume the run"
        )


def _rebuild(description: Any, hint: Any, leaves: Mapping[str, Any]) -> Any:
    structure = tree_schema.from_json(description, hint)
    count = len(tree.names(structure))
    # copies: with the memory alignment of an uninterrupted run, results are bit-identical
    return tree.unflatten([leaves[str(i)].clone() for i in range(count)], structure)


def _checksum(checkpoint: Path) -> str:
    return checksum(*(checkpoint / name for name in _FILES))
