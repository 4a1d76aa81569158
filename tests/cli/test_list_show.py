from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import parsifl
from parsifl.cli import plain_text
from parsifl.cli.app import app
from parsifl.core.registry import algorithms


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("words", "name"), [(["reprot"], "report"), (["flower", "ini"], "init")])
def test_a_misspelt_command_is_suggested_once(words: list[str], name: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.lower().count("did you mean") == 1
    assert f"'{name}'" in result.stderr


@pytest.mark.parametrize(
    ("name", "near"), [("topkk", "topk"), ("adamm", "adam"), ("fedavgg", "fedavg")]
)
def test_a_misspelt_algorithm_or_change_is_suggested(name: str, near: str) -> None:
    shown = CliRunner().invoke(app, ["show", name])
    assert shown.exit_code == 2
    assert f"'{name}'; did you mean '{near}'?" in shown.stderr


@pytest.mark.parametrize(
    ("command", "text"),
    [("list", "What to list."), ("run", "An algorithm,"), ("report", "Run directories,")],
)
def test_help_describes_the_arguments(command: str, text: str) -> None:
    shown = invoke(command, "--help")
    assert shown.count(text) == 1
    assert text in shown.partition("Arguments:")[2]


def test_examples_in_help_texts_can_be_copied() -> None:
    line = (
        "  parsifl run fedavg --data digits --clients 20 --rounds 50 --set lr=0.1 --out runs/fedavg"
    )
    assert line in [shown.removeprefix("  ") for shown in invoke("run", "--help").splitlines()]
    assert "\b" not in invoke("data", "show", "--help")


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
        assert field["description"], f"{name}.{field['name']} is not documented"
    for markup in ("\\", "`", ".. math", ":math:", "Parameters", "Annotated"):
        assert markup not in text


def test_formulas_and_settings_are_readable_in_a_terminal() -> None:
    text = invoke("show", "scaffold")
    assert "w_i ← w_i - η (g_i(w_i) - c_i + c)" in text
    assert "c_i⁺ = c_i - c + (w - w_i)/(K η)" in text
    assert "with η = lr and η_g = server_lr" in text
    fields = {
        field["name"]: field for field in json.loads(invoke("show", "fedht", "--json"))["fields"]
    }
    assert fields["lr"]["type"] == "float > 0"
    assert fields["momentum"]["type"] == "float in [0, 1)"
    assert fields["density"]["type"] == "float in [0, 1], or none"
    assert fields["scope"]["type"] == "all | layer | row"
    assert fields["batch_size"]["description"] == "Rows per step."


@pytest.mark.parametrize(
    ("latex", "lines"),
    [
        (r"\tfrac{1}{2\eta_g}\|w\|^2", ["(1/(2η_g)) ‖w‖²"]),
        (r"a \quad (b \in B_i), \qquad (k)_j = 1", ["a (b ∈ B_i)", "(k)_j = 1"]),
        (r"w_{t+1} = \overline{\Delta w}", ["w_(t+1) = mean(Δw)"]),
        (r"\hat y_{ij} \approx \mathcal{H}_\tau(x)", ["y\u0302_ij ≈ H_τ(x)"]),
    ],
)
def test_latex_becomes_plain_text(latex: str, lines: list[str]) -> None:
    assert plain_text.formula(latex) == lines


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


def test_a_reader_that_has_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    words = [sys.executable, "-c", "from parsifl.cli.app import app; app()", "--version"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_the_command_is_also_a_module() -> None:
    words = [sys.executable, "-m", "parsifl", "show", "fedavg", "--json"]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == json.loads(invoke("show", "fedavg", "--json"))
