"""The worker of a node: it keeps data, only its user reaches it, and it may be killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
if not hasattr(socket, "SO_PEERCRED"):
    pytest.skip("workers need Linux", allow_module_level=True)

from tests.flower.inprocess import fields

from parsifl.core.errors import WireError
from parsifl.flower import node, worker
from parsifl.flower.message import Envelope
from parsifl.flower.worker import AppPlace, WorkerLost, WorkerTask

APP = """
import time
from pathlib import Path

import numpy as np
from parsifl.flower import client_app

def load(node):
    place = Path(node["place"])
    with (place / "loads").open("a") as file:
        file.write("x")
    while (place / "wait").exists():
        time.sleep(0.01)
    if (place / "bad").exists():
        raise ValueError("a row that must not leave")
    return np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])

app = client_app(load)
"""


class Node:
    """A worker and its supervisor, without a SuperNode."""

    def __init__(self, folder: Path, supervised: Any, place: Path) -> None:
        self.folder, self._supervised, self._place = folder, supervised, place
        self.app = write_app(place / "app")

    @property
    def pid(self) -> int:
        return int(self._supervised.process.pid)

    def hello(self, run: int = 1, app: AppPlace | None = None) -> dict[str, Any]:
        config = {"algorithm": "fedavg", "clients": 3, "model": "glm"}
        told = {"partition-id": 2, "place": str(self._place), "state-dir": str(self._place)}
        task = WorkerTask("hello", app or self.app, run, config, told, Envelope())
        reply = fields(worker.ask(self.folder, task))
        reply.pop("machine", None)  # its clock
        return reply

    @property
    def loads(self) -> int:
        file = self._place / "loads"
        return len(file.read_text()) if file.exists() else 0


def write_app(root: Path) -> AppPlace:
    root.mkdir()
    (root / "hospital.py").write_text(APP)
    return AppPlace(str(root), "hospital", "app")


@contextmanager
def started(place: Path) -> Iterator[Node]:
    with node._listening() as (folder, listener):
        supervised = node._Supervised(listener, dict(os.environ))
        done = threading.Event()

        def keep() -> None:
            while not done.wait(0.02):
                supervised.keep()

        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            yield Node(folder, supervised, place)
        finally:
            done.set()
            keeper.join()
            node._end(supervised.process)


def test_a_worker_reads_data_once_and_lives_on_after_failures_and_kills(tmp_path: Path) -> None:
    with started(tmp_path) as found:
        first = found.hello()
        assert first["client"] == 2
        assert first["samples"] == 3
        assert found.hello() == first
        assert found.loads == 1
        assert found.hello(run=2) == first  # another run may be about other rows
        assert found.loads == 2
        # a failure is a reply, and data are read again after it
        (tmp_path / "bad").touch()
        assert found.hello(run=3) == {"error": "ValueError"}
        (tmp_path / "bad").unlink()
        assert found.hello(run=3) == first
        # killed at work: its successor gets the same request
        (tmp_path / "wait").touch()
        before, pid, answers = found.loads, found.pid, list[dict[str, Any]]()
        asking = threading.Thread(target=lambda: answers.append(found.hello(run=4)))
        asking.start()
        while found.loads == before:
            time.sleep(0.01)
        os.kill(pid, 9)
        (tmp_path / "wait").unlink()
        asking.join()
        assert answers == [first]
        assert found.pid != pid
        # another app is served by another worker
        pid = found.pid
        assert found.hello(app=write_app(tmp_path / "other")) == first
        assert found.pid != pid


def test_a_worker_is_reached_by_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tmp_path
    with node._listening() as (folder, listener):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / worker.SOCKET).stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(folder / worker.SOCKET))
            accepted, _ = listener.accept()
            with accepted:
                worker.check_peer(accepted)
                monkeypatch.setattr(os, "geteuid", lambda: 54321)
                with pytest.raises(WireError, match=f"belongs to user {os.getuid()}"):
                    worker.check_peer(accepted)
    assert not folder.exists()


def test_a_worker_that_ends_at_every_attempt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PAUSE", 0.0)
    with node._listening() as (folder, listener):

        def hang_up() -> None:
            for _ in range(5):
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        task = WorkerTask("hello", AppPlace("/", "m", "app"), 1, {}, {}, Envelope())
        with pytest.raises(WorkerLost, match="exited 5 times"):
            worker.ask(folder, task)
        thread.join()


@pytest.mark.parametrize("carried", [None, Envelope('{"a": "\\n"}', {"down": b"\n\x00", "": b""})])
def test_a_task_survives_the_socket(carried: Envelope | None) -> None:
    envelope = Envelope('{"x": 1}', {"down": b"12\n3", "model": b""}, carried)
    task = WorkerTask("train", AppPlace("/a", "b.c", "d"), 7, {"lr": 0.1}, {"n": 1}, envelope)
    assert WorkerTask.read(task.to_bytes()) == task


LIGHT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import hospital
from flwr.app import Context, RecordDict
from parsifl.flower.message import Envelope
os.environ["PARSIFL_WORKER"] = sys.argv[2]
config = {"algorithm": "fedavg", "clients": 3, "model": "glm"}
told = {"partition-id": 2, "place": sys.argv[3], "state-dir": sys.argv[3]}
reply = hospital.app._reply("hello", Envelope(), Context(1, 1, told, RecordDict(), config))
assert '"client":2' in reply.text, reply
print(*sys.modules, sep="\\n")
"""


def test_a_client_app_that_hands_over_does_not_import_torch(tmp_path: Path) -> None:
    with started(tmp_path) as found:
        done = subprocess.run(
            [sys.executable, "-c", LIGHT, found.app.root, str(found.folder), str(tmp_path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not {"torch", "scipy", "sklearn", "pydantic"} & set(done.stdout.split())


def test_a_node_ends_with_its_supernode_and_returns_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "supernode"
    script.write_text(f'#!/bin/sh\necho "$PARSIFL_WORKER $@" > {tmp_path}/told\nexit 3\n')
    script.chmod(0o700)
    monkeypatch.setattr(node, "program", lambda _: str(script))
    assert node.run_node(["--superlink", "a:1"]) == 3
    folder, *arguments = (tmp_path / "told").read_text().split()
    assert arguments == ["--superlink", "a:1"]
    assert not Path(folder).exists()
