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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from unittest import mock

DiskFault = Literal["kill", "full", "short", "flip"]
MessageFault = Literal["lost", "delayed", "duplicated", "reordered", "forged"]
MESSAGE_FAULTS: tuple[MessageFault, ...] = (
    "lost", "delayed", "duplicated", "reordered", "forged",
)  # fmt: skip


class Killed(BaseException):
    """Simulates SIGKILL: the disk does not change afterwards, even if handlers run."""


# ---------------------------------------------------------------------- disks
class Disk:
    """Counts the operations that change files below a directory, and makes one of them fail.

    Parameters
    ----------
    at
        The operation that fails, from 0; None counts only.
    fault
        "kill": a write is truncated, another operation is done or not, and `Killed` is raised at
        this and every later operation. "full": the disk is full from then on. "short": the next
        write is silently truncated. "flip": a bit of the next write is silently flipped.
    """

    def __init__(
        self,
        folder: str | Path,
        at: int | None = None,
        fault: DiskFault = "kill",
        seed: int = 0,
    ) -> None:
        self._root = str(Path(folder).resolve())
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
        return due and self._fault == "kill"

    def _die(self, what: str) -> None:
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
                self._die(name)
            found = original(path, *rest, **more)
            if due:
                self._die(name)
            return found

        return change

    def _sync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            if descriptor in self._paths and self._due("fsync", descriptor):
                self._die("fsync")
            original(descriptor)

        return sync

    def _opened(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            ours = self._ours(path)
            if ours and flags & os.O_CREAT:
                if self._due("create", path):
                    self._die("create")
                if self._full:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
            descriptor = original(path, flags, *rest, **more)
            self._paths.pop(descriptor, None)
            if ours:
                self._paths[descriptor] = str(path)
            return descriptor

        return opened

    def _file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            stream = original(file, mode, *rest, **more)
            writes = any(sign in mode for sign in "wax+")
            return _File(stream, self) if writes and self._ours(file) else stream

        return opened

    def write(self, data: Any, write: Callable[[Any], Any], path: Any) -> None:
        """Write data, or the part of it that the fault allows."""
        if self._due("write", path):
            write(data[: self._draw.randrange(len(data) + 1)])
            self._die("write")
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
