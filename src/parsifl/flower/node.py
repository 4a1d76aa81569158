"""A node with a worker: a SuperNode, and a process that answers its messages and stays.

Both end with this process. A worker that ends is replaced; requests wait in the socket meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from parsifl.core.errors import ConfigError
from parsifl.flower.logs import node_log
from parsifl.flower.processes import end_with_parent, program
from parsifl.flower.worker import SOCKET, VARIABLE, supports_workers

_POLL = 0.1
_WORKER = "from parsifl.flower.worker import main; main()"
_STOP_SECONDS = 15.0
_SHORT_LIFE = 10.0
_LONGEST_PAUSE = 30.0


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
    """The worker; one that ends is replaced, with a growing pause if it does not live long."""

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
        """Start another worker if this one has ended and the pause is over."""
        code, now = self.process.poll(), time.monotonic()
        if code is None:
            return
        if self._due is None:
            short = code != 0 and now - self._started < _SHORT_LIFE
            self._pause = min(max(2 * self._pause, 0.5), _LONGEST_PAUSE) if short else 0.0
            self._due = now + self._pause
            node_log().warning("the worker ended (%s); another one is started", code)
        if now >= self._due:
            self._replace()


@contextlib.contextmanager
def _listening() -> Iterator[tuple[Path, socket.socket]]:
    """Return a listening socket in a directory, both for this user alone."""
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
