"""Processes that end with this one, and take along whatever they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parsifl.core.errors import ConfigError

_STOP_SECONDS = 15.0
_LINGER_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a process that writes to a log; on Linux it ends even if this one is killed."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a group of its own: Ctrl-C reaches it through us alone
            preexec_fn=end_with_parent if _LIBC is not None else None,
        )


def end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and their descendants: politely, and then firmly."""
    running = [child for child in children if child.poll() is None]
    family = _descendants({child.pid for child in running})
    for child in running:
        child.terminate()
    last = time.monotonic() + _STOP_SECONDS
    for child in running:
        try:
            child.wait(max(last - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(_STOP_SECONDS)
    # Flower detaches the processes of apps; they look for their parent five times a second
    left = _gone(family)
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    _gone(left)


def _gone(family: Mapping[int, str]) -> dict[int, str]:
    """Wait for processes to end; return those that have not after some seconds."""
    last = time.monotonic() + _LINGER_SECONDS
    while (left := _same(family)) and time.monotonic() < last:
        time.sleep(0.1)
    return left


def end_with_parent() -> None:
    """Let the kernel end this process, just forked, with its parent (on Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _same(family: Mapping[int, str]) -> dict[int, str]:
    """Return those of a family that still run: a number may have been given to another process."""
    now = {number: born for number, (_, born) in _processes().items()}
    return {number: born for number, born in family.items() if now.get(number) == born}


def _descendants(roots: set[int]) -> dict[int, str]:
    """Return children and children's children of processes, each with the time of its birth."""
    found: dict[int, str] = {}
    known, processes = set(roots), _processes()
    while True:
        fresh = {n: born for n, (parent, born) in processes.items() if parent in known}
        fresh = {number: born for number, born in fresh.items() if number not in known}
        if not fresh:
            return found
        found.update(fresh)
        known.update(fresh)


def _processes() -> dict[int, tuple[int, str]]:
    """Return parent and time of birth of every process that runs; nothing without /proc."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name, in parentheses, may hold anything: what counts comes after it
            state, parent, *more = path.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # it has just ended
        if state != "Z":
            found[int(path.parent.name)] = (int(parent), more[17])
    return found


def program(name: str) -> str:
    """Return the path of a program of Flower in this environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{name} is not installed; install the extra: parsifl[flower]")
    return str(path)
