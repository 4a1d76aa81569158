"""Retention of client state, and backups of a run directory."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from parsifl.core.errors import CheckpointError, ConfigError
from parsifl.engine.safe_files import (
    locked,
    make_directory,
    remove_directory,
    remove_temporary,
    replacing,
    write_synced,
)
from parsifl.flower.settings import TRIAL_DIRECTORY

MANIFEST = "parsifl-backup.json"
_EXPERIMENT = re.compile(r"[0-9a-f]{32}")
_CLIENT = re.compile(r"client-\d+")
_STATE = re.compile(r"round-\d{8,}\.state")
_DAY = 86_400.0
_LONGEST_NAME, _LONGEST_PATH = 255, 1000  # bytes of a file name, characters of a path


@final
@dataclass(frozen=True)
class StoredRun:
    """The client state of one run on a node: its id, bytes, and when it last changed."""

    run: str
    path: Path
    size: int
    changed: float


def stored_runs(root: Path) -> list[StoredRun]:
    """Return the runs whose client state is below a state directory, oldest first."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory")
    runs = []
    for folder in root.iterdir():
        if folder.is_symlink() or not folder.is_dir() or not _EXPERIMENT.fullmatch(folder.name):
            continue
        files = [path for folder in _clients(folder) for path in _states(folder)]
        changed = max((path.stat().st_mtime for path in files), default=folder.stat().st_mtime)
        size = sum(path.stat().st_size for path in files)
        runs.append(StoredRun(folder.name, folder, size, changed))
    return sorted(runs, key=lambda item: item.changed)


def forget(runs: Sequence[StoredRun]) -> None:
    """Delete client state; other files in these directories are kept."""
    for item in runs:
        for folder in _clients(item.path):
            remove_temporary(folder)
            remove_directory(folder, [path.name for path in _states(folder)])
        if not any(item.path.iterdir()):
            item.path.rmdir()


def older_than(runs: Sequence[StoredRun], days: float) -> list[StoredRun]:
    """Return the runs that did not change in the last `days`."""
    limit = time.time() - days * _DAY
    return [item for item in runs if item.changed < limit]


def _clients(folder: Path) -> list[Path]:
    children = (path for path in folder.iterdir() if _CLIENT.fullmatch(path.name))
    return sorted(path for path in children if path.is_dir() and not path.is_symlink())


def _states(folder: Path) -> list[Path]:
    children = (path for path in folder.iterdir() if _STATE.fullmatch(path.name))
    return sorted(path for path in children if path.is_file() and not path.is_symlink())


def backup(run: Path, target: Path) -> int:
    """Copy a run directory into a .tar.gz file; return its number of files.

    Raises
    ------
    CheckpointError
        If a server is writing to the directory, or if there is no run in it.
    """
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} holds no run")
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another name")
    with locked(run):
        paths = sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink())
        paths = [p for p in paths if p.relative_to(run).parts[0] != TRIAL_DIRECTORY]
        contents = {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = json.dumps({"format": 1, "files": sums}, indent=1).encode()
    with replacing(target, 0o600) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in {MANIFEST: manifest, **contents}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return len(contents)


def restore(source: Path, run: Path) -> int:
    """Write a backup into a new or empty directory; return its number of files.

    Everything is checked before anything is written: names, and the SHA-256 sum of every file.
    """
    if run.exists() and any(run.iterdir()):
        raise CheckpointError(f"{run} is not empty; restore into a new directory")
    try:
        with tarfile.open(source, "r:gz") as archive:
            contents = {entry.name: _content(archive, entry) for entry in archive}
        _check_names(contents)
        manifest = json.loads(contents.pop(MANIFEST))
        sums = dict(manifest["files"])
    except (OSError, EOFError, tarfile.TarError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} is not a backup that can be read ({error})") from None
    damaged = [n for n in sums if hashlib.sha256(contents.get(n, b"")).hexdigest() != sums[n]]
    if damaged or contents.keys() != sums.keys():
        name = damaged[0] if damaged else sorted(contents.keys() ^ sums.keys())[0]
        raise CheckpointError(f"{source} is damaged: {name!r} is not what was saved")
    for name, data in contents.items():
        make_directory((run / name).parent)
        write_synced(run / name, data)
    return len(contents)


def _check_names(names: Collection[str]) -> None:
    """Raise ValueError unless every file can be written below the run directory."""
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    for name in names:
        steps = name.split("/")
        usable = all(
            step.isprintable() and 0 < len(step.encode()) <= _LONGEST_NAME for step in steps
        )
        if not usable or {".", ".."} & set(steps) or name in folders or len(name) > _LONGEST_PATH:
            raise ValueError(f"{name!r:.100} is not a file below the run directory")


def _content(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    if not entry.isfile():
        raise ValueError(f"{entry.name!r:.100} is not a plain file")
    file = archive.extractfile(entry)
    if file is None:
        raise ValueError(f"{entry.name!r} has no content")
    return file.read()
