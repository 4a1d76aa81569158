"""What deployments on loopback need: time limits, a relay that counts bytes, a table of them.

`python -m tests.flower.deployed` deploys three algorithms and prints the table of docs/flower.md.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.records import read_metrics

from parsifl.engine import checkpoint
from parsifl.engine.experiment import Experiment
from parsifl.flower.app_template import write_app
from parsifl.flower.cluster import HOST, Cluster, follow
from parsifl.flower.settings import Deployment, to_config

TABLE = {
    "FedAvg": Experiment("fedavg"),
    "FedSLR, lam = 0.5": Experiment("fedslr", {"global_penalty": "sparse", "lam": 0.5}),
    "FedIterHT, tau = 500": Experiment("fediterht", {"tau": 500}),
}
"""The algorithms of the table of bytes in docs/flower.md."""
_COMMON = {"model": "mlp:hidden=200+200", "clients": 3, "rounds": 2, "evaluate_every": 0}


def tabled(name: str) -> Experiment:
    """Return the experiment of a row of the table."""
    chosen = TABLE[name]
    return Experiment.read({"algorithm": chosen.algorithm, "settings": chosen.settings, **_COMMON})


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End a test that takes too long; what it deployed is ended on the way out."""

    def over(*_: object) -> None:
        raise TimeoutError(f"longer than the {seconds:g} s that this test may take")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(condition: Callable[[], bool], what: str, seconds: float = 600.0) -> None:
    """Wait for a condition; the limit is for a deployment that hangs, not for a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)


def server_state(path: Path, chosen: Experiment) -> Any:
    """Return the server's state of a run folder."""
    found = checkpoint.load(path / "checkpoint", chosen.build_algorithm().tree_types())
    assert found is not None
    return found.server


def app_of(chosen: Experiment, folder: Path, out: Path, **deployment: Any) -> Path:
    """Write the app of a trial and return its folder."""
    # without node keys a node that is restarted has another id: it may take over its client
    plan = Deployment(out=str(out), **{"rebind": True, **deployment})
    write_app(folder, "partition", to_config(chosen, plan), "trial")
    return folder


class Relay:
    """Passes connections on to an address and counts their bytes, both ways."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self.up = self.down = 0
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((host, int(port))) as far,
                ):
                    back = threading.Thread(target=relay._pass, args=(far, self.request, "down"))
                    back.start()
                    relay._pass(self.request, far, "up")
                    back.join()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address = True, True

        self._server = Server((HOST, 0), Handler)
        self.address = f"{HOST}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections."""
        self._server.shutdown()
        self._server.server_close()


class Relayed(Cluster):
    """A deployment in the clear, whose nodes reach the SuperLink through a relay."""

    def __init__(self, folder: Path, clients: int) -> None:
        super().__init__(folder, clients, secure=False)
        self.relay = Relay(self.address)

    @property
    def node_address(self) -> str:
        return self.relay.address

    def stop(self) -> None:
        super().stop()
        self.relay.close()


def deploy_counted(chosen: Experiment, folder: Path) -> tuple[list[dict[str, Any]], Relay]:
    """Deploy an experiment; return its records, and the bytes that its nodes sent and received."""
    out = folder / "run"
    app = app_of(chosen, folder / "app", out)
    with Relayed(folder / "cluster", chosen.clients or 1) as cluster:
        follow(cluster, cluster.submit(app), out)
    return read_metrics(out), cluster.relay


def row(name: str, folder: Path) -> str:
    """Deploy an algorithm and return its row of the table in docs/flower.md."""
    records, relay = deploy_counted(tabled(name), folder)
    total = {key: sum(r[key] for r in records) for key in ("dense_up", "bytes_up", "bytes_down")}
    sizes = (total["dense_up"], total["bytes_up"], relay.up, total["bytes_down"], relay.down)
    return " | ".join([f"| {name}", *(f"{size:,}" for size in sizes)]) + " |"


if __name__ == "__main__":
    for method in TABLE:
        with tempfile.TemporaryDirectory() as place:
            sys.stdout.write(row(method, Path(place)) + "\n")
