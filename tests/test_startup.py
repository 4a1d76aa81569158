"""Settings that must be in place before torch is loaded, each test in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parsifl import startup
from parsifl.cli.app import app
from parsifl.core.errors import ConfigError
from parsifl.engine import run_dir

RUN = ["run", "fedavg", "--clients", "3", "--rounds", "1"]
PRINT_DIGEST = """
import hashlib
import parsifl
from parsifl.core import tree
from parsifl.engine.experiment import Experiment

digest = hashlib.sha256()
for name, model in (("fedavg", "mlp:hidden=32"), ("fedslr", "mlp:hidden=16"), ("fedgradmp", "glm")):
    run = Experiment(name, data="digits", clients=3, rounds=2, model=model).run()
    for leaf in tree.flatten(run.server)[0]:
        digest.update(leaf.contiguous().numpy().tobytes())
    digest.update(repr(run.metrics[-1]["personal"]).encode())
print(digest.hexdigest())
"""
# Two threads share one core, so a thread that waits by spinning keeps the other from running.
PRINT_CPU_SECONDS = """
import os, time
import numpy as np
{imports}
from torch import nn
from parsifl.engine.simulate import simulate

torch.set_num_threads(2)
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
draw = np.random.default_rng(0)
clients = [(draw.normal(size=(80, 64)).astype("f4"), draw.integers(0, 2, 80)) for _ in range(5)]
problem = parsifl.NeuralProblem(
    lambda: nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 2))
)
method = parsifl.get("fedavg", lr=0.1, local_steps=5, batch_size=32)
simulate(method, problem, clients, 1)
start = time.process_time()
simulate(method, problem, clients, 10)
print(time.process_time() - start)
"""


def python(code: str, **variables: str) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (*startup.WAITING, *startup.REPRODUCIBLE, startup.VARIABLE)
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True
    )
    return ended.stdout.strip() if ended.returncode == 0 else ended.stderr


@pytest.mark.slow
def test_a_reproducible_run_keeps_its_bits_whatever_instruction_sets_are_requested() -> None:
    varied: list[dict[str, str]] = [
        {},
        {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3"},
    ]
    digests = {python(PRINT_DIGEST, PARSIFL_REPRODUCIBLE="1", **each) for each in varied}
    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_the_option_sets_the_variables_and_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [*RUN, "--reproducible", "--out", str(out)]
    code = f"""
import sys
from parsifl.cli.app import app
app({arguments!r}, standalone_mode=False)
import os, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), os.environ["MKL_CBWR"])
"""
    assert python(code).splitlines()[-1] == "DEFAULT 1 COMPATIBLE"
    assert run_dir.read_config(out)["run"]["reproducible"] is True
    (out / "environment.json").write_text("damaged")
    resumed = CliRunner().invoke(app, [*RUN, "--resume", "--out", str(out)])
    assert resumed.exit_code == 2
    assert "was created by a reproducible run" in resumed.output


def test_a_run_that_is_not_reproducible_does_not_claim_to_be(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, [*RUN, "--out", str(tmp_path)]).exit_code == 0
    assert "reproducible" not in run_dir.read_config(tmp_path)["run"]


@pytest.mark.parametrize("command", [["run", "fedavg"], ["sweep", "fedavg", "--grid", "lr=1"]])
def test_the_option_is_an_error_once_torch_is_loaded(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--reproducible"])
    assert result.exit_code == 2
    assert "request a reproducible run before importing torch and numpy" in result.output


def test_the_variable_is_an_error_once_torch_is_loaded() -> None:
    assert "before importing torch" in python("import torch, parsifl", PARSIFL_REPRODUCIBLE="1")


def test_settings_that_are_in_place_already_are_accepted() -> None:
    code = "import torch, parsifl; print(parsifl.startup.reproducible())"
    assert python(code, PARSIFL_REPRODUCIBLE="1", **startup.REPRODUCIBLE) == "True"


def test_a_variable_that_is_set_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup.VARIABLE, "1")
    with pytest.raises(ConfigError, match="was set after parsifl was imported"):
        startup.reproducible()


def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup.VARIABLE, "yes")
    with pytest.raises(ConfigError, match="must be 0 or 1, got 'yes'"):
        startup.prepare()


def test_another_processor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(ConfigError, match="x86-64 processor; this one is arm64"):
        startup.make_reproducible()


def test_the_command_line_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, parsifl.cli.app; print([n for n in ('numpy', 'torch') if n in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP and CPU affinity")
def test_a_run_does_not_import_the_compiler_of_torch() -> None:
    code = f"""
import sys
from parsifl.cli.app import app
app({RUN!r}, standalone_mode=False)
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""
    assert python(code).splitlines()[-1] == "True False"


def test_threads_that_wait_do_not_spin_whatever_is_imported_first() -> None:
    orders = ("import parsifl, torch", "import torch, parsifl")
    least = dict.fromkeys(orders, float("inf"))
    for _ in range(2):
        for order in orders:
            least[order] = min(least[order], float(python(PRINT_CPU_SECONDS.format(imports=order))))
        parsifl_first, torch_first = (least[order] for order in orders)
        if torch_first < 2 * parsifl_first:  # about 20 times if threads spin
            return
    pytest.fail(f"{torch_first:.2f} s instead of {parsifl_first:.2f} s: threads spin")
