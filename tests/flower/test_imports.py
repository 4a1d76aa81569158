"""Every message starts a process: what a client imports is what a round waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

CLIENT = """
import sys
from pathlib import Path

from parsifl.flower import client_app, settings
from parsifl.flower.message import respond
from parsifl.flower.client import RemoteClient, alone
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import HelloReply, TrainRequest, read

client_app()
experiment = settings.read({"algorithm": "ditto", "clients": 3, "data": "digits"}).experiment
site = RemoteClient(experiment, 0, alone(experiment.load(), 0), Path(sys.argv[1]))
schema = read(HelloReply, respond(site, "hello", Envelope())).data_schema
head = dict(client=0, round=0, experiment="0" * 32, accepted=0, oldest=0, data_schema=schema)
model = site._make(schema.example())
from parsifl import wire
from parsifl.core.keys import Key
algorithm = experiment.build_algorithm()
server = algorithm.init_server(model, [None] * 3, Key(0))
down = {"down": wire.encode(algorithm.broadcast(model, server, None, Key(0)))}
reply = respond(site, "train", TrainRequest(**head, uploads=True).envelope(down))
assert "upload" in reply.parts, reply
print(*sys.modules, sep="\\n")
"""
HEAVY = {"IPython", "joblib", "matplotlib", "pandas", "ray", "scipy", "sklearn"}


def test_a_client_imports_its_algorithm_and_no_heavy_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert not HEAVY & {name.partition(".")[0] for name in found}
    start = "parsifl.algorithms."
    names = {name.removeprefix(start) for name in found if name.startswith(start)}
    assert {name for name in names if not name.startswith("_")} == {"ditto"}
    assert not any(name.startswith(("parsifl.masks", "parsifl.report")) for name in found)
