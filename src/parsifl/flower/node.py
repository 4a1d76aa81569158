"""A node with a worker: a SuperNode, and a long-lived process that answers its messages.

Both stop with this process. A worker that exits is replaced; requests wait in the socket meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from parsifl.core.errors import ConfigError
from parsifl.flower.logs import node_log
from parsifl.flower.worker import SOCKET, VARIABLE, supports_workers

_STOP_SECONDS = 15.0
_LINGER_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_POLL = 0.1
_WORKER = "from parsifl.flower.worker import main; main()"
_SHORT_LIFE = 10.0
_LONGEST_PAUSE = 30.0


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a process that writes to a log; on Linux it stops even if this one is killed."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches it only through this process
            preexec_fn=end_with_parent if _LIBC is not None else None,
        )


def end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate processes and their descendants; kill those that do not exit in time."""
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
    # Flower detaches the processes of apps; they check for their parent five times per second
    _, left = psutil.wait_procs(family, _LINGER_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, _LINGER_SECONDS)


def end_with_parent() -> None:
    """Make the kernel stop this forked process with its parent (on Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def program(name: str) -> str:
    """Return the path of a Flower program in this environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{name} is not installed; install the extra: parsifl[flower]")
    return str(path)


def run_node(arguments: Sequence[str]) -> int:
    """Run a SuperNode with these arguments and a worker; return the SuperNode's exit code."""
    if not supports_workers():
        raise ConfigError("a worker needs Linux, where sockets identify their peers")
    with _listening() as (folder, listener):
        environment = {**os.environ, VARIABLE: str(folder)}
        node = _start([program("flower-supernode"), *arguments], environment)
        worker = _Supervised(listener, environment)
        before = {
            number: signal.signal(number, lambda got, _: node.send_signal(got))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while node.poll() is None:
                worker.keep()
                time.sleep(_POLL)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for child in (node, worker.process):
                _end(child)
    return node.returncode


class _Supervised:
    """The worker; one that exits is replaced, with increasing delays if it exits early."""

    def __init__(self, listener: socket.socket, environment: dict[str, str]) -> None:
        self._listener, self._environment = listener, environment
        self._pause = 0.0
        self._replace()

    def _replace(self) -> None:
        descriptor = self._listener.fileno()
        command = [sys.executable, "-c", _WORKER, str(descriptor)]
        self.process = _start(command, self._environment, descriptor)
        self._started = time.monotonic()
        self._due: float | None = None

    def keep(self) -> None:
        """Start another worker if this one has exited and the delay has passed."""
        code, now = self.process.poll(), time.monotonic()
        if code is None:
            return
        if self._due is None:
            short = code != 0 and now - self._started < _SHORT_LIFE
            self._pause = min(max(2 * self._pause, 0.5), _LONGEST_PAUSE) if short else 0.0
            self._due = now + self._pause
            node_log().warning("the worker exited (%s); another one is started", code)
        if now >= self._due:
            self._replace()


@contextlib.contextmanager
def _listening() -> Iterator[tuple[Path, socket.socket]]:
    """Return a listening socket in a directory, both accessible only to this user."""
    folder = Path(tempfile.mkdtemp(prefix="parsifl-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / SOCKET))
            (folder / SOCKET).chmod(0o600)
            listener.listen()
            yield folder, listener
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    command: Sequence[str], environment: dict[str, str], *descriptors: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, pass_fds=descriptors, preexec_fn=end_with_parent
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
