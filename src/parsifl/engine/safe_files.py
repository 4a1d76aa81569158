"""File operations that never replace or delete files that a run did not write."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from parsifl.core.errors import CheckpointError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)
_held: dict[tuple[Path, int], int] = {}  # how often a thread has locked a directory


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a directory against other runs; create it if it is missing.

    The kernel releases the lock whenever the process ends, and no file is left. A thread may lock
    a directory twice.

    Raises
    ------
    CheckpointError
        If another run uses the directory, or if its name is invalid.
    """
    try:
        make_directory(folder)
        here = (folder.resolve(), threading.get_ident())
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} cannot be created: a file is in the way; choose another directory"
        ) from error
    except ValueError as error:  # a NUL
        raise CheckpointError(f"{str(folder)!r} is not a valid directory name") from error
    descriptor = _lock(folder) if here not in _held else None
    _held[here] = _held.get(here, 0) + 1
    try:
        yield
    finally:
        _held[here] -= 1
        if not _held[here]:
            del _held[here]
        if descriptor is not None:
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"another run is writing to {folder}: wait for it to end, or choose another directory"
        ) from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def reject_links(*paths: Path) -> None:
    """Raise CheckpointError if one of the paths is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, and a run never replaces or deletes files elsewhere; "
                "remove the link, or choose another directory"
            )


def reject_foreign(folder: Path, names: Iterable[str], mark: str) -> None:
    """Raise CheckpointError if a directory has files with our names but not our `mark`."""
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        raise CheckpointError(
            f"{folder} holds {', '.join(existing)} but no {mark} of Parsifl; the files may not "
            "belong to a run and are left alone: move them, or choose another directory"
        )


def make_directory(folder: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, so that they survive a power loss."""
    for path in [*reversed([path for path in folder.parents if not path.exists()]), folder]:
        is_new = not path.exists()
        path.mkdir(mode, exist_ok=True)
        if is_new:
            sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    """Wait until the names in a directory are on disk; syncing a file leaves its name out."""
    if os.name != "posix":  # directories cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a new file and wait until it is on disk, with its name.

    An existing file is replaced, never written to, because it may be a link.
    """
    path.unlink(missing_ok=True)
    with _new_file(path, mode) as file:
        file.write(content)
    sync_directory(path.parent)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically when the block ends without an error.

    A reader sees the old or the new content, and so does one after a power loss. The temporary
    name is random, so no other file can have it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with _new_file(temporary, mode) as file:
            yield file
        temporary.replace(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically; see `replacing`."""
    with replacing(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def _new_file(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Open a file that must not exist yet, and sync it at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def remove_temporary(folder: Path) -> None:
    """Delete the files that an interrupted `replacing` left in a directory."""
    for path in folder.iterdir():
        if is_temporary(path):
            path.unlink()


def is_temporary(path: Path) -> bool:
    """Return whether a file is what an interrupted `replacing` left."""
    return bool(_TEMPORARY.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def remove_directory(folder: Path, names: Iterable[str]) -> None:
    """Delete a directory if it contains only regular files with these names."""
    if folder.is_symlink() or not folder.is_dir():
        return
    children, known = list(folder.iterdir()), set(names)
    if all(path.name in known and path.is_file() and not path.is_symlink() for path in children):
        for path in children:
            path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
