from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from parsifl.cli import doctor as module
from parsifl.cli.doctor import CheckResult, data_folders, examine, extras, packages, threads

REQUIREMENTS = ["numpy>=1.20", "torch>=2.0", "nothing-like-it>=1; extra == 'rare'"]


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(module.doctor)
    return app


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the outcome independent of how this machine is set up."""
    monkeypatch.setattr("importlib.metadata.requires", lambda _: REQUIREMENTS)
    monkeypatch.delenv("PARSIFL_DATA", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def run(app: typer.Typer, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout


def by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in findings}


def test_a_healthy_installation_has_no_problem(command: typer.Typer) -> None:
    code, text = run(command)
    assert code == 0
    assert "No problems found" in text
    assert "PROBLEM" not in text


def test_json_is_for_machines(command: typer.Typer) -> None:
    code, text = run(command, "--json")
    found: dict[str, Any] = json.loads(text)
    assert code == 0
    assert found["ok"] is True
    names = {finding["name"] for finding in found["findings"]}
    assert {"python", "torch", "threads", "waiting", "algorithms", "wire", "datasets"} <= names


def test_a_missing_package_is_a_problem_and_a_missing_extra_is_a_note(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_name(list(extras(REQUIREMENTS)))["extra rare"].status == "note"
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["nothing-like-it>=1"])
    code, text = run(command)
    assert code == 1
    assert "pip install 'nothing-like-it>=1'" in text


@pytest.mark.parametrize(("bound", "status"), [(">=1.0", "ok"), (">=999", "problem")])
def test_versions_are_compared(bound: str, status: str) -> None:
    assert by_name(list(packages([f"numpy{bound}"])))["numpy"].status == status


def test_developers_tools_are_not_extras() -> None:
    assert not list(extras(["nothing-like-it; extra == 'dev'"]))


def test_a_data_folder_that_is_none_is_a_problem(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PARSIFL_DATA", str(tmp_path / "nowhere"))
    code, text = run(command)
    assert code == 1
    assert "$PARSIFL_DATA is not a directory" in text


def test_a_dataset_is_present_when_all_of_its_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "heart-disease"
    folder.mkdir()
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        assert "heart-disease" not in by_name(list(data_folders(tmp_path)))["datasets"].text
        (folder / f"processed.{hospital}.data").touch()
    assert "heart-disease" in by_name(list(data_folders(tmp_path)))["datasets"].text


def test_spinning_threads_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(list(threads()))["waiting"].status == "ok"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert by_name(list(threads()))["waiting"].status == "note"


def test_a_check_that_raises_is_a_problem_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(module, "registered", broken)
    found = by_name(examine())["algorithms"]
    assert found.status == "problem"
    assert "no such library" in found.text


def test_the_module_can_be_loaded_without_torch() -> None:
    code = "import sys, parsifl.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
