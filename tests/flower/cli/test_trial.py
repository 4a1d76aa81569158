from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from tests.report.folders import make_run
from typer.testing import CliRunner

from parsifl.cli.errors import FriendlyGroup
from parsifl.flower.cli.trial import _run, app
from parsifl.flower.settings import DONE_FILE

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


def test_an_app_for_own_data_names_no_data_set(tmp_path: Path) -> None:
    assert invoke("init", str(tmp_path / "app"), "--template", "csv")[0] == 0
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert "data" not in project["tool"]["flwr"]["app"]["config"]


def test_init_tells_a_mistake_before_anything_is_written(tmp_path: Path) -> None:
    regression = ("--template", "sparse-regression", "--rounds", "0")
    assert "rounds = 0" in invoke("init", str(tmp_path / "app"), *regression)[2]
    code, _, err = invoke("init", str(tmp_path / "app"), "--set", "rate=1")
    assert code == 2
    assert "rate" in err
    assert not (tmp_path / "app").exists()


def test_keys_says_what_goes_where(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    code, out, _ = invoke("keys", str(tmp_path / "keys"), "--nodes", "2", "--host", "10.0.0.1")
    assert code == 0
    assert "keep them on the server" in out
    assert (tmp_path / "keys" / "node1.pub").exists()
    assert invoke("keys", str(tmp_path / "keys"))[0] == 2


def test_up_refuses_a_folder_that_is_no_app(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    from parsifl.core.errors import ConfigError
    from parsifl.flower.cli.trial import read_config

    with pytest.raises(ConfigError, match="does not contain a Flower app"):
        read_config(tmp_path)


class Pretended:
    """Stands in for a cluster: the run is done as soon as it is submitted."""

    address, variables_file = "127.0.0.1:1", Path("variables.sh")
    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, folder: Path, clients: int, **more: Any) -> None:
        self.made.append({"folder": folder, "clients": clients, **more})

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.made[-1]["stopped"] = True

    def submit(self, target: Path, **changes: Any) -> str:
        self.made[-1]["changes"] = changes
        (target / "run").mkdir()
        (target / "run" / "done").touch()
        return "1"

    def alive(self) -> bool:
        return False

    def log_tail(self, _: str) -> str:
        return "the end"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    monkeypatch.setattr("parsifl.flower.cluster.Cluster", Pretended)
    monkeypatch.setattr(Pretended, "made", [])
    return Pretended.made


def test_up_runs_an_app_and_ends_the_nodes(tmp_path: Path, pretended: list[dict[str, Any]]) -> None:
    assert invoke("init", str(tmp_path / "app"), "--template", "partition")[0] == 0
    code, out, err = invoke(
        "up", "--app", str(tmp_path / "app"), "--resume", "--node-config", 'data="{folder}/{id}"'
    )
    assert code == 0, err
    assert "parsifl report" in out
    (made,) = pretended
    assert made["secure"] is True
    assert made["changes"] == {"deployment.resume": True}
    assert made["node_config"] == f'data="{Path.cwd()}/{{id}}"'
    assert made["stopped"]


def test_up_without_an_app_stays_and_plain_connections_must_be_asked_for(
    pretended: list[dict[str, Any]],
) -> None:
    code, _, err = invoke("up", "--clients", "2", "--insecure")
    assert code == 2
    assert "flwr run APP" in err
    assert "the SuperLink has exited" in err
    assert pretended[0]["secure"] is False


def test_an_experiment_is_handed_to_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")
    from parsifl.core import plugins
    from parsifl.engine.experiment import Experiment

    def run_on_flower(chosen: Experiment, out: Path, **more: Any) -> tuple[Any, ...]:
        return chosen, out, more["simulation"], more["resume"], more["data_dir"]

    monkeypatch.setattr("parsifl.flower.cluster.run_on_flower", run_on_flower)
    chosen: Any = Experiment("fedavg")
    data = tmp_path / "data"
    execute = plugins.load(plugins.ENGINES, "flower-sim")
    result: Any = execute(chosen, tmp_path, resume=True, data_dir=data, quiet=True)
    assert result == (chosen, tmp_path, True, True, data)


def test_a_run_ends_with_its_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("init", str(tmp_path / "app"), "--template", "sparse-regression")[0] == 0
    run = tmp_path / "app" / "run"

    class Sure:
        def submit(self, _: Path) -> str:
            lines = make_run(run).joinpath("metrics.jsonl").read_text().splitlines()
            noted = [json.dumps({**json.loads(line), "notes": ["left out: 2"]}) for line in lines]
            (run / "metrics.jsonl").write_text("\n".join(noted) + "\n")
            (run / DONE_FILE).touch()
            return "1"

    _run(Sure(), tmp_path / "app", resume=False)  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.err.count("note: left out: 2") == 1
    assert "shows it" in shown.out
