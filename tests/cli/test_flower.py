from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from parsifl.cli.flower import app
from parsifl.cli.friendly import FriendlyGroup

shell = typer.Typer(cls=FriendlyGroup)
shell.add_typer(app, name="flower")


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(shell, ["flower", *words])
    return result.exit_code, result.stdout, result.stderr


def test_init_writes_an_app_with_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    code, out, err = invoke(
        "init", str(folder), "--algorithm", "ditto", "--set", "lr=0.5", "--clients", "4",
        "--template", "partition", "--data", "digits",
    )  # fmt: skip
    assert code == 0, err
    assert "README.md" in out
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert config["clients"] == 4
    assert config["settings"] == {"lr": "0.5"}
    assert Path(config["deployment"]["out"]).is_absolute()


def test_init_tells_a_mistake_before_anything_is_written(tmp_path: Path) -> None:
    code, _, err = invoke("init", str(tmp_path / "app"), "--set", "rate=1")
    assert code == 2
    assert "rate" in err
    assert not (tmp_path / "app").exists()


def test_keys_says_what_goes_where(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    code, out, _ = invoke("keys", str(tmp_path / "keys"), "--nodes", "2", "--host", "10.0.0.1")
    assert code == 0
    assert "the server alone" in out
    assert (tmp_path / "keys" / "node1.pub").exists()
    assert invoke("keys", str(tmp_path / "keys"))[0] == 2


def test_up_refuses_a_folder_that_is_no_app(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    from parsifl.cli.flower import _config
    from parsifl.errors import ConfigError

    with pytest.raises(ConfigError, match="no Flower app"):
        _config(tmp_path)
