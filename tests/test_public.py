from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch
from torch import nn

import parsifl


def test_the_public_names_are_these() -> None:
    assert sorted(parsifl.__all__) == [
        "ClientData",
        "Evaluation",
        "GLM",
        "Metric",
        "NetworkModel",
        "NeuralProblem",
        "Run",
        "get",
        "open_run",
        "simulate",
    ]
    for name in (*parsifl.__all__, *parsifl.PACKAGES):
        assert getattr(parsifl, name) is not None
        assert name in dir(parsifl)


def test_importing_parsifl_does_not_import_torch() -> None:
    code = "import sys, parsifl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_help_imports_nothing_that_takes_long() -> None:
    """The modules are counted, not the seconds: 0.26 s without them, several with torch."""
    code = (
        "import sys; from parsifl.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "reproduce" in done.stdout
    loaded = {line.split(".")[0] for line in done.stderr.splitlines()}
    assert "parsifl" in loaded
    assert not loaded & {"torch", "scipy", "sklearn", "pandas", "cvxpy", "flwr", "pydantic"}


def test_own_module_and_own_arrays_work() -> None:
    generator = np.random.default_rng(0)
    clients = []
    for _ in range(4):
        x = generator.normal(size=(60, 5))
        clients.append((x.astype(np.float32), (x[:, 0] > 0).astype(int)))
    problem = parsifl.NeuralProblem(lambda: nn.Linear(5, 2))
    run = parsifl.simulate(parsifl.get("fedavg", lr=0.5), problem, clients, rounds=20)
    assert run.metrics[-1]["global"]["test"]["accuracy"]["mean"] > 0.9
    assert run.bytes_up > 0
    assert run.bytes_down > 0
    assert run.server["weight"].shape == (2, 5)
    own = torch.from_numpy(clients[0][0])
    personal = run.personal(0)
    assert personal.problem.predict(personal.params, own).shape == (60, 2)
    assert run.summary()["global"]["mean"] > 0.9
