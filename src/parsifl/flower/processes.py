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

import psutil

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
    """Terminate processes and their descendants; kill those that do not end in time."""
    running = [child for child in children if child.poll() is None]
    family: list[psutil.Process] = []
    for child in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(child.pid).children(recursive=True)
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
    _, left = psutil.wait_procs(family, _LINGER_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, _LINGER_SECONDS)


def end_with_parent() -> None:
    """Let the kernel end this process, just forked, with its parent (on Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def program(name: str) -> str:
    """Return the path of a program of Flower in this environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{name} is not installed; install the extra: parsifl[flower]")
    return str(path)
