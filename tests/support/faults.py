"""Fault injection: failing disks, killed processes, lost messages and clock jumps.

Every fault is drawn from a seed, so a failure that a test prints can be repeated. These tools
inject faults; tests check the outcome. A run under test should end with bit-identical results, or
with an error or a note that names the fault, but never with different numbers and no message.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self
from unittest import mock

Loss = Literal["random", "data", "entries"]
DiskFault = Literal["kill", "lost-data", "lost-entries", "full", "short", "flip"]
_LOSSES: Mapping[DiskFault, Loss] = {
    "kill": "random", "lost-data": "data", "lost-entries": "entries",
}  # fmt: skip
MessageFault = Literal["lost", "delayed", "duplicated", "reordered", "forged"]
MESSAGE_FAULTS: tuple[MessageFault, ...] = (
    "lost", "delayed", "duplicated", "reordered", "forged",
)  # fmt: skip


class Killed(BaseException):
    """Simulates a power loss: the disk does not change afterwards, even if handlers run."""


# ---------------------------------------------------------------------- disks
@dataclass(eq=False)
class _Node:
    """A file or a directory, whatever its name.

    Attributes
    ----------
    synced
        The content of a file at its last fsync.
    removed
        The content of a file when its last name was removed.
    entries
        The entries of a directory at its last fsync and after every later change.
    """

    synced: bytes = b""
    removed: bytes = b""
    entries: list[dict[str, _Node]] = field(default_factory=list)


class _Durability:
    """What a power loss may take from a directory: everything that was not synced.

    The content of a file is safe after an fsync of the file, its name after an fsync of the
    directory. The operations on one directory are lost from the last one backwards, as on a
    journaling file system; those on different directories are lost independently.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._nodes: dict[int, _Node] = {}  # by inode; removed ones only in entries
        root.mkdir(parents=True, exist_ok=True)
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            self.changed(folder)
            self.sync(folder.stat().st_ino)
        for path in root.rglob("*"):
            if path.is_file():
                self.sync(path.stat().st_ino)

    def __contains__(self, inode: int) -> bool:
        return inode in self._nodes

    def changed(self, folder: Path) -> None:
        """Note the entries of a directory after one of them has changed."""
        entries = {each.name: self._node(each.inode()) for each in os.scandir(folder)}
        self._node(folder.stat().st_ino).entries.append(entries)

    def remove(self, path: Path) -> None:
        """Note the content of a file that is about to lose its name."""
        if not path.exists():
            return
        node = self._nodes.pop(path.stat().st_ino)
        if path.is_file():
            node.removed = path.read_bytes()

    def sync(self, inode: int) -> None:
        """Make the content of a file, or the entries of a directory, durable."""
        node = self._nodes[inode]
        if node.entries:
            node.entries = node.entries[-1:]
            return
        node.synced = self.path(inode).read_bytes()

    def path(self, inode: int) -> Path:
        """Return the current path of a file or directory."""
        paths = itertools.chain([self._root], self._root.rglob("*"))
        return next(path for path in paths if path.lstat().st_ino == inode)

    def lose(self, loss: Loss, draw: random.Random) -> None:
        """Leave on the disk what a power loss leaves."""
        for path in self._root.rglob("*"):
            if path.is_file():
                self._nodes[path.stat().st_ino].removed = path.read_bytes()
        left = self._left(self._nodes[self._root.stat().st_ino], loss, draw)
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _write(self._root, left)

    def _left(self, node: _Node, loss: Loss, draw: random.Random) -> Any:
        if not node.entries:
            before, now = node.synced, node.removed
            if loss == "random" and before != now:
                safe = len(before) if now.startswith(before) else 0  # appending loses nothing
                return draw.choice([before, now, now[: draw.randrange(safe, len(now) + 1)]])
            return before if loss == "data" else now
        if loss == "random":
            entries = draw.choice(node.entries)
        else:
            entries = node.entries[-1 if loss == "data" else 0]
        return {name: self._left(child, loss, draw) for name, child in sorted(entries.items())}

    def _node(self, inode: int) -> _Node:
        return self._nodes.setdefault(inode, _Node())


def _write(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).mkdir()
            _write(folder / name, content)


class Disk:
    """Counts the operations that change files below a directory, and makes one of them fail.

    Parameters
    ----------
    at
        The operation that fails, from 0; None counts only.
    fault
        "kill": a write is truncated, another operation is done or not, and `Killed` is raised at
        this and every later operation; a random part of what was not synced is lost. "lost-data":
        the same, but all unsynced contents of files are lost, and no entry of a directory.
        "lost-entries": all unsynced entries of directories are lost, and no content. "full": the
        disk is full from then on. "short": the next write is silently truncated. "flip": a bit of
        the next write is silently flipped.
    """

    def __init__(
        self,
        folder: str | Path,
        at: int | None = None,
        fault: DiskFault = "kill",
        seed: int = 0,
    ) -> None:
        self._root = str(Path(folder).resolve())
        self._durability = _Durability(Path(self._root))
        self._at, self._fault = at, fault
        self._draw = random.Random(f"disk/{seed}")
        self._paths: dict[int, str] = {}  # of open descriptors
        self._patches = ExitStack()
        self._pending = False  # a silent fault waits for a write
        self._dead = self._full = False
        self.operations = 0
        self.log: list[str] = []

    def __enter__(self) -> Self:
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
            self._patch(os, name, self._change(name, getattr(os, name)))
        self._patch(os, "fsync", self._sync(os.fsync))
        self._patch(os, "open", self._opened(os.open))
        opener = self._file(io.open)
        self._patch(io, "open", opener)
        self._patch(builtins, "open", opener)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()
        if self._dead:
            self._durability.lose(_LOSSES[self._fault], self._draw)

    def _patch(self, module: Any, name: str, new: Any) -> None:
        self._patches.enter_context(mock.patch.object(module, name, new))

    def _ours(self, path: Any) -> bool:
        if isinstance(path, int):
            return path in self._paths
        return str(Path(os.path.abspath(os.fspath(path)))).startswith(self._root)

    def _due(self, what: str, path: Any) -> bool:
        """Count an operation; return whether it is the one that fails."""
        if self._dead:
            raise Killed(what)
        self.log.append(f"{what} {os.path.basename(str(self._paths.get(path, path)))}")
        due = self.operations == self._at
        self.operations += 1
        if due and self._fault == "full":
            self._full = True
        if due and self._fault in ("short", "flip"):
            self._pending = True
        return due and self._fault in _LOSSES

    def power_off(self, what: str = "power off") -> NoReturn:
        """Raise `Killed`; what was not synced is lost when the `with` block ends."""
        self._dead = True
        raise Killed(what)

    def _change(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *rest: Any, **more: Any) -> Any:
            if not self._ours(path):
                return original(path, *rest, **more)
            due = self._due(name, path)
            if self._full and name == "mkdir":
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            if due and self._draw.random() < 0.5:
                self.power_off(name)
            target = rest[0] if name in ("replace", "rename") else path
            if name != "mkdir":
                self._durability.remove(Path(target))
            try:
                found = original(path, *rest, **more)
            except OSError:
                if due:
                    self.power_off(name)
                raise
            created = {Path(path)} if name == "mkdir" else set()
            for folder in {Path(path).parent, Path(target).parent, *created}:
                self._durability.changed(folder)
            if due:
                self.power_off(name)
            return found

        return change

    def _sync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            inode = os.fstat(descriptor).st_ino
            ours = inode in self._durability
            if ours and self._due("fsync", self._durability.path(inode)):
                self.power_off("fsync")
            original(descriptor)
            if ours:
                self._durability.sync(inode)

        return sync

    def _opened(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            ours = self._ours(path)
            if ours and flags & os.O_CREAT:
                if self._due("create", path):
                    self.power_off("create")
                if self._full:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
            created = ours and not os.path.lexists(path)
            descriptor = original(path, flags, *rest, **more)
            self._paths.pop(descriptor, None)
            if ours:
                self._paths[descriptor] = str(path)
            if created:
                self._durability.changed(Path(path).parent)
            return descriptor

        return opened

    def _file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if not any(sign in mode for sign in "wax+") or not self._ours(file):
                return original(file, mode, *rest, **more)
            created = not isinstance(file, int) and not os.path.lexists(file)
            stream = original(file, mode, *rest, **more)
            if created:
                self._durability.changed(Path(file).parent)
            return _File(stream, self)

        return opened

    def write(self, data: Any, write: Callable[[Any], Any], path: Any) -> None:
        """Write data, or the part of it that the fault allows."""
        if self._due("write", path):
            write(data[: self._draw.randrange(len(data) + 1)])
            self.power_off("write")
        if self._full:
            write(data[: self._draw.randrange(len(data) + 1)])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if self._pending and data:
            self._pending = False
            data = damaged(data, "cut" if self._fault == "short" else "flip", self._draw)
        write(data)


class _File:
    """A file whose writes go through a `Disk`."""

    def __init__(self, stream: Any, disk: Disk) -> None:
        self._stream, self._disk = stream, disk

    def write(self, data: Any) -> int:
        self._disk.write(data, self._flushed, self._stream.name)
        return len(data)

    def _flushed(self, data: Any) -> None:
        self._stream.write(data)
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# ---------------------------------------------------------------------- damage
Damage = Literal["flip", "cut", "zero", "swap", "append", "empty"]
DAMAGES: tuple[Damage, ...] = ("flip", "cut", "zero", "swap", "append", "empty")


def damaged(data: Any, damage: Damage, draw: random.Random) -> Any:
    """Return bytes (or text) with one kind of damage.

    >>> damaged(b"abc", "empty", random.Random(0))
    b''
    """
    if isinstance(data, str):
        return damaged(data.encode(), damage, draw).decode(errors="replace")
    found = bytearray(data)
    at = draw.randrange(len(found)) if found else 0
    if damage == "flip" and found:
        found[at] ^= 1 << draw.randrange(8)
    elif damage == "cut":
        del found[at:]
    elif damage == "zero":
        found[at : at + 64] = bytes(len(found[at : at + 64]))
    elif damage == "swap":
        lines = bytes(found).splitlines(keepends=True)
        draw.shuffle(lines)
        return b"".join(lines)
    elif damage == "append":
        found += draw.randbytes(draw.choice([1, 40])) if draw.random() < 0.5 else found[at:]
    elif damage == "empty":
        found.clear()
    return bytes(found)


def damage_file(folder: Path, seed: int) -> str:
    """Damage or delete one file below a directory; return the damage and the file."""
    draw = random.Random(f"damage/{seed}")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    if draw.random() < 0.1:
        path.unlink()
        return f"delete {path.relative_to(folder)}"
    damage = draw.choice([*DAMAGES, "flip", "flip"])
    path.write_bytes(damaged(path.read_bytes(), damage, draw))
    return f"{damage} {path.relative_to(folder)}"


# ---------------------------------------------------------------------- messages
class FaultyLink:
    """A network (`flower.message.Link`) with faulty delivery.

    Parameters
    ----------
    rate
        The fraction of requests with a fault.
    kinds
        The kinds of requests that may have one.
    """

    def __init__(
        self,
        link: Any,
        seed: int,
        rate: float = 0.3,
        kinds: Sequence[str] = ("train", "evaluate"),
        faults: Sequence[MessageFault] = MESSAGE_FAULTS,
    ) -> None:
        self._link, self._rate = link, rate
        self._kinds, self._faults = kinds, faults
        self._draw = random.Random(f"messages/{seed}")
        self._late: dict[int, Any] = {}
        self.planted: list[tuple[MessageFault, str, int]] = []

    def nodes(self) -> list[int]:
        """Return the connected nodes."""
        found: list[int] = self._link.nodes()
        return found

    def pause(self, seconds: float) -> None:
        """Wait."""
        self._link.pause(seconds)

    def ask(
        self,
        requests: Mapping[int, tuple[Any, Any]],
        timeout: float,
        enough: Callable[[Any], bool] | None = None,
    ) -> dict[int, Any]:
        """Send requests in any order; replies are lost, late, duplicated, swapped or forged."""
        found: dict[int, Any] = {}
        swapped: list[int] = []
        for node in self._draw.sample(sorted(requests), len(requests)):
            kind, request = requests[node]
            reply = self._link.ask({node: (kind, request)}, timeout, enough).get(node)
            late = self._late.pop(node, None)
            if reply is None or kind not in self._kinds or self._draw.random() > self._rate:
                found[node] = reply if late is None else late
                continue
            fault = self._draw.choice(self._faults)
            self.planted.append((fault, kind, node))
            if fault == "delayed":
                self._late[node] = reply
            elif fault == "duplicated":  # the client works twice
                found[node] = self._link.ask({node: (kind, request)}, timeout, enough).get(node)
            elif fault == "reordered":
                swapped.append(node)
                found[node] = reply
            elif fault == "forged":
                found[node] = self._forged(reply)
        for one, other in itertools.pairwise(swapped):
            found[one], found[other] = found[other], found[one]
        return {node: reply for node, reply in found.items() if reply is not None}

    def _forged(self, reply: Any) -> Any:
        """Return a reply with damaged parts, or with truncated text."""
        if not isinstance(reply, str) and reply.parts and self._draw.random() < 0.7:
            name = self._draw.choice(sorted(reply.parts))
            damage = self._draw.choice(DAMAGES)
            return replace(
                reply,
                parts={**reply.parts, name: damaged(reply.parts[name], damage, self._draw)},
            )
        return reply if isinstance(reply, str) else replace(reply, text=reply.text[:-2])


# ---------------------------------------------------------------------- clocks
@contextmanager
def clock_jumps(seed: int, largest: float = 86400.0) -> Iterator[None]:
    """Make the wall clock jump in both directions, and the monotonic clock jump forward.

    This simulates a clock adjustment or a suspended machine.
    """
    draw = random.Random(f"clock/{seed}")
    wall, monotonic, leapt = time.time, time.monotonic, 0.0

    def leaping() -> float:
        nonlocal leapt
        if draw.random() < 0.05:
            leapt += draw.uniform(0.0, largest)
        return monotonic() + leapt

    def jumping() -> float:
        return wall() + draw.uniform(-largest, largest)

    with mock.patch.object(time, "time", jumping), mock.patch.object(time, "monotonic", leaping):
        yield
