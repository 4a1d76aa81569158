"""The worker of a node: a process that stays, with its imports and the client's data.

`flower.node` starts it with a listening socket and starts another one when it ends. It serves one
app: if a request names another one, it ends before it replies, and the ClientApp hands the request
to its successor.
"""

from __future__ import annotations

import importlib
import socket
import sys
from functools import partial

from parsifl.flower import client, worker_link  # noqa: F401 - imports torch before the first request
from parsifl.flower.answering import Answering, answered, respond
from parsifl.flower.clientapp import ParsiflClientApp
from parsifl.flower.logs import node_log
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import failure_in
from parsifl.flower.worker_link import AppPlace, WorkerTask

_READ_SECONDS = 60.0


class Worker:
    """Answers tasks of one app; keeps the client of the last run, and with it its data."""

    def __init__(self) -> None:
        self._place: AppPlace | None = None
        self._app: ParsiflClientApp | None = None
        self._client: Answering | None = None
        self._run: object = None

    def serve(self, listener: socket.socket) -> None:
        """Answer one connection after the other, for ever."""
        while True:
            link, _ = listener.accept()
            with link:
                try:
                    worker_link.check_peer(link)
                    link.settimeout(_READ_SECONDS)
                    task = WorkerTask.read(worker_link.receive(link))
                    link.settimeout(None)
                    reply = answered(partial(self.answer, task))
                    worker_link.send(link, worker_link.reply_bytes(reply))
                except Exception:  # one connection; the next ClientApp is served
                    node_log().exception("a connection to the worker failed")

    def answer(self, task: WorkerTask) -> Envelope:
        """Answer a task; data are read again for another run, and after a failure."""
        run = (task.run, dict(task.run_config), dict(task.node_config))
        if self._client is None or self._run != run:
            self._client = None
            self._client = self._load(task.app).make(task.run_config, task.node_config)
            self._run = run
        reply = respond(self._client, task.kind, task.envelope)
        if failure_in(reply) is not None:  # a table may have been corrected meanwhile
            self._client = None
        return reply

    def _load(self, place: AppPlace) -> ParsiflClientApp:
        if self._place not in (None, place):
            raise SystemExit(0)
        if self._app is None:
            self._place = place
            sys.path.insert(0, place.root)
            self._app = getattr(importlib.import_module(place.module), place.name)
        assert isinstance(self._app, ParsiflClientApp)
        return self._app


def main() -> None:
    """Serve the socket whose descriptor is the argument."""
    Worker().serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
