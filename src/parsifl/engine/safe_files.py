"""File operations that never replace or delete files that a run did not write."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from parsifl.core.errors import CheckpointError

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
        folder.mkdir(parents=True, exist_ok=True)
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
    found = [name for name in names if (folder / name).exists()]
    if found:
        raise CheckpointError(
            f"{folder} holds {', '.join(found)} but no {mark} of Parsifl; the files may not "
            "belong to a run and are left alone: move them, or choose another directory"
        )


def write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a new file and wait until it is on disk.

    An existing file is replaced, never written to, because it may be a link.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, content)
    temporary.replace(path)


def remove_directory(place: Path, names: Iterable[str]) -> None:
    """Delete a directory if it contains only regular files with these names."""
    if place.is_symlink() or not place.is_dir():
        return
    found, known = list(place.iterdir()), set(names)
    if all(path.name in known and path.is_file() and not path.is_symlink() for path in found):
        for path in found:
            path.unlink()
        with contextlib.suppress(OSError):
            place.rmdir()
