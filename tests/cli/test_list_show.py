from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import parsifl
from parsifl.cli.app import app
from parsifl.core.registry import algorithms


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models", "partitions"])
def test_every_kind_can_be_listed_for_people_and_machines(kind: str) -> None:
    rows = json.loads(invoke("list", kind, "--json"))
    assert isinstance(rows, dict)
    text = invoke("list", kind)
    for name, description in rows.items():
        assert name in text
        assert description


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_algorithm_can_be_shown(name: str) -> None:
    found = json.loads(invoke("show", name, "--json"))
    assert found["name"] == name
    assert found["cites"]
    text = invoke("show", name)
    for field in found["fields"]:
        assert field["name"] in text


def test_the_linear_model_is_listed_and_named_where_it_is_needed() -> None:
    assert "linear" in json.loads(invoke("list", "models", "--json"))["glm"]
    assert "needs a problem that is SupportSolvable: parsifl.GLM (--model glm)" in invoke(
        "show", "fedgradmp"
    )


def test_parsifl_alone_says_where_to_start() -> None:
    assert "parsifl demo" in invoke()


def test_version() -> None:
    assert invoke("--version").strip() == parsifl.__version__


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from parsifl.cli.app import app; "
        "sys.exit(1 if 'torch' in sys.modules or 'sklearn' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["run", "demo", "sweep", "reproduce", "list", "show", "report", "data", "masks"]
)
def test_every_command_has_help(command: str) -> None:
    assert "--help" in invoke(command, "--help")
