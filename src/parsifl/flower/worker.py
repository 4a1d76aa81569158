"""The worker of a node, a long-lived process that ClientApps reach over a Unix socket.

`flower.node` starts the worker with a listening socket, and restarts it when it exits. A worker
serves one app: if a request names another one, it exits without a reply, and the ClientApp passes
the request to its successor. The socket is 0600 in a directory that is 0700, and each side checks
that the other one is a process of the same user. Only the serving process imports torch.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from parsifl.core.errors import ParsiflError, WireError
from parsifl.flower.logs import node_log
from parsifl.flower.message import Answering, Envelope, Kind, answered, respond

if TYPE_CHECKING:
    from parsifl.flower.clientapp import ParsiflClientApp

VARIABLE = "PARSIFL_WORKER"
"""The directory of the socket, for the processes of a node."""
SOCKET = "socket"
_ATTEMPTS = 5
_PAUSE = 0.2
_SIZE = struct.Struct("!Q")
_LONGEST = 1 << 34
_CREDENTIALS = struct.Struct("3i")
_READ_SECONDS = 60.0


class WorkerLost(ParsiflError):
    """The worker exited several times while it worked on one request."""


@final
@dataclass(frozen=True)
class AppPlace:
    """Where an app is: a directory for `sys.path`, a module and the app's name in it."""

    root: str
    module: str
    name: str


@final
@dataclass(frozen=True)
class WorkerTask:
    """A request, and what is needed to answer it in another process."""

    kind: Kind
    app: AppPlace
    run: int
    run_config: Mapping[str, Any]
    node_config: Mapping[str, Any]
    envelope: Envelope

    def to_bytes(self) -> bytes:
        """Return the task as bytes."""
        head = {
            "kind": self.kind,
            "app": [self.app.root, self.app.module, self.app.name],
            "run": self.run,
            "run_config": dict(self.run_config),
            "node_config": dict(self.node_config),
        }
        return _frame(head, self.envelope)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote."""
        head, envelope = _unframe(data)
        head["app"] = AppPlace(*head["app"])
        return cls(**head, envelope=envelope)


def ask(folder: Path, task: WorkerTask) -> Envelope:
    """Pass a task to the worker; repeat it if the worker exits before it has replied.

    That is harmless: every request names the state to start from.
    """
    data = task.to_bytes()
    for _ in range(_ATTEMPTS):
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(folder / SOCKET))
                check_peer(link)
                send(link, data)
                return _unframe(receive(link))[1]
        except (ConnectionError, EOFError):
            time.sleep(_PAUSE)  # the node starts another one
    raise WorkerLost(f"the worker exited {_ATTEMPTS} times while it worked on one request")


def reply_bytes(envelope: Envelope) -> bytes:
    """Return a reply as bytes."""
    return _frame({}, envelope)


def supports_workers() -> bool:
    """Return whether sockets identify their peers on this platform, as on Linux."""
    return hasattr(socket, "SO_PEERCRED")


def check_peer(link: socket.socket) -> None:
    """Raise WireError unless the process at the other end belongs to this user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise WireError(f"the other end of the socket belongs to user {user}")


def send(link: socket.socket, data: bytes) -> None:
    """Send one message."""
    link.sendall(_SIZE.pack(len(data)))
    link.sendall(data)


def receive(link: socket.socket) -> bytes:
    """Return one message; raise EOFError if the connection is closed."""
    (size,) = _SIZE.unpack(_exactly(link, _SIZE.size))
    if size > _LONGEST:
        raise WireError(f"length: {size} bytes, at most {_LONGEST} are read")
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = link.recv(min(size - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _frame(head: Mapping[str, Any], envelope: Envelope) -> bytes:
    """Return a line of JSON, followed by the parts."""
    envelopes = [envelope, *([] if envelope.carried is None else [envelope.carried])]
    fields = [
        {"text": one.text, "parts": {name: len(data) for name, data in one.parts.items()}}
        for one in envelopes
    ]
    line = json.dumps({"head": head, "envelopes": fields}).encode()
    return b"".join([line, b"\n", *(data for one in envelopes for data in one.parts.values())])


def _unframe(data: bytes) -> tuple[dict[str, Any], Envelope]:
    line, _, rest = data.partition(b"\n")
    fields = json.loads(line)
    carried: Envelope | None = None
    end = len(rest)
    for one in reversed(fields["envelopes"]):
        parts: dict[str, bytes] = {}
        start = end - sum(one["parts"].values())
        position = start
        for name, size in one["parts"].items():
            parts[name] = rest[position : position + size]
            position += size
        carried, end = Envelope(one["text"], parts, carried), start
    assert carried is not None
    return fields["head"], carried


class Worker:
    """Answers tasks of one app; keeps the client of the last run, and with it its data."""

    def __init__(self) -> None:
        self._place: AppPlace | None = None
        self._app: ParsiflClientApp | None = None
        self._client: Answering | None = None
        self._run: object = None

    def serve(self, listener: socket.socket) -> None:
        """Answer connections, one at a time, until the process ends."""
        while True:
            link, _ = listener.accept()
            with link:
                try:
                    check_peer(link)
                    link.settimeout(_READ_SECONDS)
                    task = WorkerTask.read(receive(link))
                    link.settimeout(None)
                    reply = answered(partial(self.answer, task))
                    send(link, reply_bytes(reply))
                except Exception:  # one connection; the next ClientApp is served
                    node_log().exception("a connection to the worker failed")

    def answer(self, task: WorkerTask) -> Envelope:
        """Answer a task; data are read again for a new run, and after a failure."""
        run = (task.run, dict(task.run_config), dict(task.node_config))
        if self._client is None or self._run != run:
            self._client = None
            self._client = self._load(task.app).make(task.run_config, task.node_config)
            self._run = run
        from parsifl.flower.network_schema import failure_in

        reply = respond(self._client, task.kind, task.envelope)
        if failure_in(reply) is not None:  # a table may have been corrected meanwhile
            self._client = None
        return reply

    def _load(self, app: AppPlace) -> ParsiflClientApp:
        if self._place not in (None, app):
            raise SystemExit(0)
        if self._app is None:
            self._place = app
            sys.path.insert(0, app.root)
            self._app = getattr(importlib.import_module(app.module), app.name)
        assert self._app is not None
        return self._app


def main() -> None:
    """Serve the socket whose descriptor is the argument."""
    from parsifl.flower import client  # noqa: F401 - imports torch before the first request

    Worker().serve(socket.socket(fileno=int(sys.argv[1])))
