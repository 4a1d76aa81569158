"""Monitoring of a running server: `status.json` and a metrics endpoint.

Both contain numbers, client and node ids, and the reasons in the record, but never text from a
client.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from parsifl.core.errors import ConfigError
from parsifl.engine.record import RoundRecord
from parsifl.engine.safe_files import reject_foreign, reject_links, replace_file
from parsifl.flower.logs import note_context
from parsifl.flower.membership import Log, Membership
from parsifl.flower.message import Link, Replies, Requests
from parsifl.flower.server_health import ServerHealth, expiry
from parsifl.flower.settings import STATUS_FILE

FORMAT = 2
ALIVE_SECONDS = 20.0
"""A server whose status is older has ended."""
_HEARTBEAT_SECONDS = 5.0
_WRITE_SECONDS = 1.0
_MISSING_SECONDS = 15.0


class Monitor:
    """Keeps the status of a run.

    Parameters
    ----------
    out
        The run directory.
    algorithm, rounds, clients
        The algorithm, the total number of rounds, and the number of clients.
    log
        Receives who is missing while the server waits for clients.
    port
        The port of the metrics endpoint on loopback; 0 for none.
    certificate
        The SuperLink's certificate; empty if unknown.
    """

    def __init__(
        self,
        out: Path,
        algorithm: str,
        rounds: int,
        clients: int,
        log: Log,
        port: int = 0,
        certificate: str = "",
    ) -> None:
        self._path, self._log = out / STATUS_FILE, log
        now = time.time()
        self._members: Membership | None = None
        self._replied: dict[int, float] = {}  # when each node replied last
        self._took: dict[int, float] = {}  # seconds of its last reply, by node
        self._heard: set[int] = set()  # nodes that have replied in this exchange
        self._problems: dict[int, str] = {}  # by client
        self._written = 0.0
        self._reminded = time.monotonic()
        self._expires = expiry(Path(certificate)) if certificate else None
        self._latest: Mapping[str, Any] = {}  # what the heartbeat writes again
        self._writing = threading.Lock()
        self._status: dict[str, Any] = {
            "format": FORMAT,
            "algorithm": algorithm,
            "state": "waiting for clients",
            "round": 0,
            "rounds": rounds,
            "expected_clients": clients,
            "started": now,
            "bytes_up": 0,
            "bytes_down": 0,
            "dropped": 0,
            "last_error": "",
            "exchange": None,
        }
        self._metrics = _Metrics(port, clients, rounds) if port else None

    def check(self) -> None:
        """Raise CheckpointError if a file that is not a status would be replaced."""
        reject_links(self._path)
        try:
            if self._path.exists():
                read_status(self._path.parent)
        except ConfigError:
            reject_foreign(self._path.parent, [STATUS_FILE], "status")

    def watch(self, link: Link) -> Link:
        """Return the link wrapped by a monitor."""
        return _WatchedLink(link, self)

    def attach(self, members: Membership, run: str) -> None:
        """Set which node is which client."""
        self._members = members
        note_context(run=run)

    def health(self) -> ServerHealth:
        """Return the state of the server's machine."""
        return ServerHealth.of(self._path.parent, self._expires)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write the status regularly while the block runs, so that a reader sees the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_HEARTBEAT_SECONDS):
                with suppress(OSError):  # a full disk: the status says "ended" until it is free
                    self._save()

        thread = threading.Thread(target=beat, name="parsifl-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # ------------------------------------------------------------------ events
    def resume(self, records: Sequence[RoundRecord]) -> None:
        """Start from the records of an earlier server."""
        for record in records:
            self._add(record)

    def paused(self) -> None:
        """Log who is missing, now and then, while the server waits for clients."""
        waiting = self._status["state"] == "waiting for clients"
        if not waiting or self._members is None:
            return
        if time.monotonic() - self._reminded >= _MISSING_SECONDS:
            self._reminded = time.monotonic()
            missing = sorted(
                set(range(self._status["expected_clients"])) - {*self._members.online()}
            )
            if missing:
                self._log(f"waiting for the clients {', '.join(map(str, missing))}")
        self._write()

    def asked(self, requests: Requests) -> None:
        """Record the start of an exchange."""
        kinds = {kind for kind, _ in requests.values()}
        kind = "train" if "train" in kinds else min(kinds, default="hello")
        if kind in ("train", "evaluate"):
            self._status["state"] = "training" if kind == "train" else "evaluating"
        self._heard = set()
        self._status["exchange"] = {
            "kind": kind,
            "since": time.time(),
            "asked": len(requests),
            "waiting_for_nodes": sorted(requests),
        }
        self._write()

    def replied(self, replies: Replies) -> None:
        """Record which nodes have replied so far."""
        exchange, now = self._status["exchange"], time.time()
        for node in replies.keys() - self._heard:
            self._replied[node], self._took[node] = now, now - exchange["since"]
        self._heard |= replies.keys()
        waiting = exchange["waiting_for_nodes"]
        exchange["waiting_for_nodes"] = [node for node in waiting if node not in replies]
        self._write()

    def answered(self, replies: Replies) -> None:
        """Record the end of an exchange."""
        self.replied(replies)
        exchange = self._status["exchange"]
        self._status["exchange"] = None
        if self._metrics is not None:
            self._metrics.exchange(exchange["kind"], time.time() - exchange["since"])
        self._write()

    def round(self, record: RoundRecord) -> None:
        """Update the status from the record of a round."""
        self._add(record)
        note_context(round=record.round)
        self._write(now=True)

    def _add(self, record: RoundRecord) -> None:
        status = self._status
        status["round"] = record.round
        status["bytes_up"] += record.bytes_up
        status["bytes_down"] += record.bytes_down
        status["dropped"] += len(record.dropped)
        self._problems |= {
            client: f"round {record.round}: {reason}" for client, reason in record.dropped.items()
        }
        if self._metrics is not None:
            self._metrics.round(record)

    def ended(self, state: Literal["done", "checked", "failed"], error: str = "") -> None:
        """Record that the server stops, with or without an error."""
        self._status |= {"state": state, "last_error": error}
        self._status["exchange"] = None
        self._write(now=True)

    # ------------------------------------------------------------------ output
    def _write(self, *, now: bool = False) -> None:
        moment = time.monotonic()
        clients, health = self._clients(), self.health()
        if self._metrics is not None:
            self._metrics.machines(clients, health)
        server = {"free": health.free, "certificate_expires": health.expires}
        exchange = self._status["exchange"]
        self._latest = {
            **self._status,
            "exchange": exchange and dict(exchange),  # another thread writes it
            "server": server,
            "clients": clients,
        }
        if now or moment - self._written >= _WRITE_SECONDS:
            self._written = moment
            self._save()

    def _save(self) -> None:
        with self._writing:
            if self._latest:
                status = {**self._latest, "updated": time.time()}
                replace_file(self._path, json.dumps(status, indent=1).encode())

    def _clients(self) -> list[dict[str, Any]]:
        members = self._members
        if members is None:
            return []
        online = members.online()
        return [
            {
                "client": client,
                "node": node,
                "connected": client in online,
                "last_reply": self._replied.get(node),
                "reply_seconds": self._took.get(node),
                "parsifl": machine.parsifl if (machine := members.machines.get(client)) else None,
                "last_problem": self._problems.get(client, ""),
            }
            for client, node in sorted(members.owners().items())
        ]


class _WatchedLink:
    """A link that reports its exchanges to a monitor."""

    def __init__(self, link: Link, monitor: Monitor) -> None:
        self._link, self._monitor = link, monitor

    def nodes(self) -> list[int]:
        return self._link.nodes()

    def ask(
        self,
        requests: Requests,
        timeout: float,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        self._monitor.asked(requests)

        def watched(replies: Replies) -> bool:
            self._monitor.replied(replies)
            return enough is not None and enough(replies)

        replies = self._link.ask(requests, timeout, watched)
        self._monitor.answered(replies)
        return replies

    def pause(self, seconds: float) -> None:
        self._monitor.paused()
        self._link.pause(seconds)


class _Metrics:
    """The metrics endpoint, on loopback."""

    def __init__(self, port: int, clients: int, rounds: int) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise ConfigError(
                "deployment.metrics_port needs prometheus-client; install the extra: "
                "parsifl[metrics]"
            ) from None
        registry = prometheus.CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Gauge(f"parsifl_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Counter(f"parsifl_{name}", text, labels, registry=registry)

        self._round = gauge("round", "Completed rounds.")
        gauge("rounds", "Total number of rounds.").set(rounds)
        gauge("clients_expected", "Clients of the federation.").set(clients)
        self._connected = gauge("clients_connected", "Clients that are connected.")
        self._bytes = counter("bytes_total", "Bytes of messages.", ("direction",))
        for direction in ("up", "down"):
            self._bytes.labels(direction)
        self._last_reply = gauge(
            "client_last_reply_timestamp_seconds", "When a client replied last.", ("client",)
        )
        self._took = gauge("client_reply_seconds", "Duration of its last reply.", ("client",))
        self._free = gauge("server_free_bytes", "Free disk space for the run directory.")
        self._expires = gauge("certificate_expiry_timestamp_seconds", "Expiry of the certificate.")
        self._dropped = counter("dropped_total", "Results that were dropped.")
        self._last = gauge("last_round_timestamp_seconds", "When the last round was recorded.")
        self._exchange = prometheus.Histogram(
            "parsifl_exchange_seconds",
            "Duration of an exchange with all clients.",
            ("kind",),
            buckets=(0.5, 1, 2, 5, 10, 20, 60, 300, 1800),
            registry=registry,
        )
        try:
            prometheus.start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ConfigError(f"deployment.metrics_port={port} cannot be opened: {error}") from None

    def exchange(self, kind: str, seconds: float) -> None:
        self._exchange.labels(kind).observe(seconds)

    def machines(self, clients: Sequence[Mapping[str, Any]], health: ServerHealth) -> None:
        self._connected.set(sum(client["connected"] for client in clients))
        for client in clients:
            if client["last_reply"] is not None:
                self._last_reply.labels(client["client"]).set(client["last_reply"])
                self._took.labels(client["client"]).set(client["reply_seconds"])
        self._free.set(health.free)
        if health.expires is not None:
            self._expires.set(health.expires)

    def round(self, record: RoundRecord) -> None:
        self._round.set(record.round)
        self._bytes.labels("up").inc(record.bytes_up)
        self._bytes.labels("down").inc(record.bytes_down)
        self._dropped.inc(len(record.dropped))
        self._last.set_to_current_time()


def read_status(out: Path) -> dict[str, Any]:
    """Return the status of a run; raise ConfigError if it cannot be read."""
    path = out / STATUS_FILE
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ConfigError(f"{path} has format {content['format']}, this version reads {FORMAT}")
    except FileNotFoundError:
        raise ConfigError(
            f"{out} has no {STATUS_FILE}: no server of a deployment has started there"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    status: dict[str, Any] = content
    return status
