from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parsifl.cli.data import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARSIFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")


def test_show_draws_the_labels_of_every_client() -> None:
    result = runner.invoke(app, ["show", "digits", "--clients", "10"])
    assert result.exit_code == 0, result.output
    assert "10 clients, pathological" in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("│")]
    assert len(lines) == 10
    for client, line in enumerate(lines):
        bar = line.split("│")[5].strip()
        assert set(bar) == {str(client % 10), str((client + 1) % 10)}
        assert len(bar) == 40


def test_show_limits_what_it_draws() -> None:
    result = runner.invoke(app, ["show", "digits", "--partition", "iid", "--limit", "3"])
    assert "... and 17 more" in result.output


def test_show_prints_json_for_machines() -> None:
    result = runner.invoke(
        app, ["show", "digits", "--clients", "4", "--partition", "dirichlet:alpha=0.5", "--json"]
    )
    facts = json.loads(result.stdout)
    assert facts["clients"] == 4
    assert len(facts["shares"]) == 4
    assert facts["licence"]
    assert sum(facts["train"]) + sum(facts["test"]) == 1797


def test_show_handles_targets_that_are_numbers() -> None:
    name = "fedgradmp:clients=3,samples=8,dimension=20,sparsity=2"
    result = runner.invoke(app, ["show", name])
    assert result.exit_code == 0
    assert "a number to predict" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "digitz"], "did you mean 'digits'"),
        (["show", "digits", "--partition", "dirichlet:alpha=x"], "Input should be a valid number"),
        (["show", "digits", "--clients", "9999"], "too few for 9999 clients"),
        (["fetch", "nothing-such"], "unknown dataset"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_two(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_fetch_says_what_is_missing_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("pooch.retrieve", refuse)
    result = runner.invoke(app, ["fetch", "mnist", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "train-images-idx3-ubyte.gz" in result.stderr
    assert str(tmp_path / "mnist") in result.stderr


def test_fetch_lists_the_files_or_says_that_none_are_needed(tmp_path: Path) -> None:
    assert "needs no files" in runner.invoke(app, ["fetch", "synthetic"]).output
    (tmp_path / "cifar-100/cifar-100-binary").mkdir(parents=True)
    for name in ("train.bin", "test.bin"):
        (tmp_path / f"cifar-100/cifar-100-binary/{name}").write_bytes(b"")
    arguments = ["fetch", "cifar-100", "--data-dir", str(tmp_path)]
    assert len(runner.invoke(app, arguments).output.splitlines()) == 2
    facts = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert [Path(path).name for path in facts["files"]] == ["train.bin", "test.bin"]
