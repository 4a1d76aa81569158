"""Freed memory stays in the process: a count of page faults, which load does not change."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine import allocator

FAULTS = """
import resource, sys
import numpy as np, torch
import parsifl
from parsifl.engine.experiment import problem_for

torch.set_num_threads(1)
draw = np.random.default_rng(0)
clients = parsifl.ClientData.of(
    [(draw.normal(size=(60, 3, 32, 32)).astype("f4"), np.arange(60) % 10) for _ in range(2)]
)
faults = []
parsifl.simulate(
    parsifl.get("fedavg", lr=0.01, local_steps=10, batch_size=20),
    problem_for("vgg", clients),
    clients,
    6,
    evaluate_every=0,
    run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
    callbacks=[lambda _: faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)],
)
# the median over rounds: a later round may still enlarge the heap once
print(np.median(np.diff(faults)) / (2 * 10))
"""
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators have no mallopt"
)


def faults_per_step(*folder: Path, **variables: str) -> float:
    """Return the page faults per local step after the first round, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *map(str, folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return float(done.stdout)


@needs_glibc
@pytest.mark.slow
def test_a_local_step_takes_almost_no_page_fault() -> None:
    assert faults_per_step() < 5


@needs_glibc
@pytest.mark.slow
def test_a_run_records_the_allocator(tmp_path: Path) -> None:
    faults_per_step(tmp_path)
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert recorded["allocator"] == "glibc, freed memory is kept"


@pytest.mark.slow
def test_the_allocator_can_be_left_alone(tmp_path: Path) -> None:
    faults_per_step(tmp_path, PARSIFL_MALLOC="0")
    assert json.loads((tmp_path / "environment.json").read_text())["allocator"] == "default"


def test_a_wrong_value_of_the_variable_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSIFL_MALLOC", "off")
    with pytest.raises(ConfigError, match="PARSIFL_MALLOC must be 0 or 1, got 'off'"):
        allocator.keep_freed_memory.__wrapped__()


def test_a_system_without_glibc_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delenv("PARSIFL_MALLOC", raising=False)
    assert not allocator.keep_freed_memory.__wrapped__()
