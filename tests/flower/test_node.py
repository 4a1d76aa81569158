from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parsifl.flower import node

DETACHED = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
pathlib.Path("child").write_text(str(child.pid))
time.sleep(60)
"""
PARENT = """
import os, pathlib, sys, time
from parsifl.flower import node
here = pathlib.Path.cwd()
child = node.start(["sleep", "60"], here / "log", dict(os.environ), here)
(here / "child").write_text(str(child.pid))
time.sleep(60)
"""


def number_in(path: Path) -> int:
    end = time.monotonic() + 200
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(path.read_text())


def runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_grandchild_that_was_detached_is_ended_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DETACHED]
    child = node.start(command, tmp_path / "log", dict(os.environ), tmp_path)
    grandchild = number_in(tmp_path / "child")
    assert runs(grandchild)
    node.end([child])
    assert child.returncode == -signal.SIGTERM
    assert not runs(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children on Linux alone")
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    try:
        child = number_in(tmp_path / "child")
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_child_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_STOP_SECONDS", 0.5)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(60)"
    command, log = [sys.executable, "-u", "-c", stubborn], tmp_path / "log"
    child = node.start(command, log, dict(os.environ), tmp_path)
    number_in(log)
    node.end([child])
    assert child.returncode == -signal.SIGKILL
