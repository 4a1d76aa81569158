"""The Flower ServerApp: a `Federation` over Flower's grid."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from parsifl.core.errors import ParsiflError
from parsifl.engine.safe_files import locked, replace_file
from parsifl.flower import settings
from parsifl.flower.client import MakeProblem
from parsifl.flower.logs import log_file, server_log
from parsifl.flower.message import (
    Envelope,
    Link,
    Replies,
    Requests,
    message_type,
    pack,
    printable,
    unpack,
)
from parsifl.flower.network_schema import describe
from parsifl.flower.server import Federation
from parsifl.flower.settings import (
    DONE_FILE,
    ERROR_FILE,
    LOG_FILE,
    PROCESS_FILE,
    DeploymentSettings,
    clear,
)

_PULL_SECONDS = 0.1
_REPEAT_SECONDS = 30.0
"""No request is repeated earlier."""


def server_app(problem: MakeProblem | None = None) -> ServerApp:
    """Create a ServerApp that runs any registered algorithm; `problem` as in `client_app`."""
    return app_of(lambda chosen, link: Federation(chosen, link, server_log, problem))


def app_of(make: Callable[[DeploymentSettings, Link], Federation]) -> ServerApp:
    """Create a ServerApp that runs what `make` builds from the settings of a run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = settings.read(context.run_config)
        out = Path(chosen.deployment.out)
        with locked(out):  # the markers belong to a server that is still running
            clear(out)
            replace_file(out / PROCESS_FILE, str(os.getpid()).encode())
            with log_file(out / LOG_FILE):
                try:
                    _carry_out(make(chosen, GridLink(grid)), check=chosen.deployment.check)
                except Exception as error:
                    server_log(f"the run has failed: {_text(error)}")
                    text = f"{_text(error)}\n".encode(errors="backslashreplace")
                    replace_file(out / ERROR_FILE, text)
                    raise
            replace_file(out / DONE_FILE, b"")

    return app


def _carry_out(federation: Federation, *, check: bool) -> None:
    try:
        with federation.monitor.heartbeat():
            if check:
                _check(federation)
            else:
                federation.run()
    except Exception as error:
        federation.monitor.ended("failed", _text(error))
        raise
    federation.monitor.ended("checked" if check else "done")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ParsiflError) else repr(error)


def _check(federation: Federation) -> None:
    if problems := federation.check():
        raise ParsiflError("the check found problems:\n  " + "\n  ".join(problems))
    server_log("the check found no problem")


class GridLink:
    """Flower's grid as a `Link`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._slowest: dict[int, float] = {}  # seconds of each node's slowest reply

    def nodes(self) -> list[int]:
        """Return the connected nodes."""
        return sorted(self._grid.get_node_ids())

    def ask(
        self,
        requests: Requests,
        timeout: float,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        """Send one message to each node and take the first reply of each.

        A connected node whose reply is overdue is asked once more, because a reply can get lost on
        its way. That is harmless: every request names the state to start from.
        """
        if not requests:
            return {}
        started, pending = time.monotonic(), self._send(requests, timeout)
        replies: Replies = {}
        seconds: list[float] = []
        repeated: set[int] = set()
        # Flower's send_and_receive polls every three seconds, and also waits for dead nodes
        while True:
            for reply in self._grid.pull_messages(pending):
                pending.discard(reply.metadata.reply_to_message_id)
                node = reply.metadata.src_node_id
                if node in requests and node not in replies:
                    replies[node] = _read(reply)
                    seconds.append(time.monotonic() - started)
                    self._slowest[node] = max(self._slowest.get(node, 0.0), seconds[-1])
            elapsed, waiting = time.monotonic() - started, requests.keys() - replies.keys()
            if not waiting or (enough is not None and enough(replies)) or elapsed > timeout:
                return replies
            if overdue := self._overdue(waiting - repeated, seconds, len(requests), elapsed):
                repeated |= overdue
                again = {node: requests[node] for node in overdue & {*self.nodes()}}
                pending |= self._send(again, timeout - elapsed)
            self.pause(_PULL_SECONDS)

    def _send(self, requests: Requests, seconds: float) -> set[str]:
        messages = [
            Message(pack(request), dst_node_id=node, message_type=message_type(kind), ttl=seconds)
            for node, (kind, request) in requests.items()
        ]
        return set(self._grid.push_messages(messages)) if messages else set()

    def _overdue(
        self, waiting: set[int], seconds: Sequence[float], asked: int, elapsed: float
    ) -> set[int]:
        """Return nodes that take far longer than the median, and than they ever took."""
        if 2 * len(seconds) < asked:  # the median is not known yet
            return set()
        limit = max(_REPEAT_SECONDS, 3 * median(seconds))
        return {node for node in waiting if elapsed > max(limit, 2 * self._slowest.get(node, 0.0))}

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def _read(reply: Message) -> Envelope | str:
    try:
        if reply.has_error():
            return printable(f"Flower error {reply.error.code}: {reply.error.reason}")
        return unpack(reply.content)
    except Exception as error:  # an invalid reply of one node must not affect the others
        return describe(error)
