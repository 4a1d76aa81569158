"""Commands of the deployment leave files alone that they have not written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from parsifl.core.errors import CheckpointError, ConfigError, DataError
from parsifl.engine.experiment import Experiment
from parsifl.flower.app_template import write_app
from parsifl.flower.cluster import Cluster, run_on_flower
from parsifl.flower.settings import clear
from parsifl.flower.tls import make_keys
from parsifl_reproduction.pages import write_pages
from parsifl_reproduction.record import write

CHOSEN = Experiment("fedavg", data="digits", clients=2, rounds=1)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint/a",
        "metrics.jsonl",
        "error.txt",
        "done",
        "server.pid",
        "server.log",
        "flower/app/pyproject.toml",
        "flower/app/federation/model.py",
        "flower/superlink.db",
        "flower/keys/ca.key",
        "flower/variables.sh",
    ],
)
def test_a_trial_rejects_a_directory_with_files_of_others(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    with pytest.raises((CheckpointError, ConfigError), match="another"):
        run_on_flower(CHOSEN, tmp_path)
    assert path.read_text() == "precious"


def test_a_trial_rejects_links(tmp_path: Path) -> None:
    victim = put(tmp_path / "victim" / "app" / "pyproject.toml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "flower").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match="symbolic link"):
        run_on_flower(CHOSEN, tmp_path / "run")
    assert victim.read_text() == "precious"


def test_marks_of_a_server_are_cleared(tmp_path: Path) -> None:
    for name, text in (("server.pid", "12"), ("done", ""), ("error.txt", "it ended")):
        (tmp_path / name).write_text(text)
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["server.pid"]


def test_an_app_is_replaced_only_if_it_was_written_here(tmp_path: Path) -> None:
    for rounds in (1, 2):
        write_app(tmp_path / "app", "partition", {"rounds": rounds}, "trial", replace=True)
    assert "rounds = 2" in (tmp_path / "app" / "pyproject.toml").read_text()
    with pytest.raises(ConfigError, match="already holds an app"):
        write_app(tmp_path / "app", "partition", {}, "other", replace=True)
    readme = put(tmp_path / "own" / "README.md")
    with pytest.raises(ConfigError, match=r"README.md, which would be overwritten"):
        write_app(tmp_path / "own", "csv", {}, "federation")
    assert readme.read_text() == "precious"


@pytest.mark.parametrize("name", ["ca.key", "server.key", "server.crt", "node1", "node0.pub"])
def test_keys_do_not_replace_files(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    mode = tmp_path.stat().st_mode
    with pytest.raises(ConfigError, match="would be overwritten"):
        make_keys(tmp_path, 2)
    assert path.read_text() == "precious"
    assert tmp_path.stat().st_mode == mode


def test_a_cluster_accepts_the_folder_of_an_earlier_one(tmp_path: Path) -> None:
    for _ in range(2):
        cluster = Cluster(tmp_path / "cluster", 1, secure=False)
        assert "FLWR_HOME" in cluster.variables_file.read_text()


def test_pages_and_records_do_not_replace_files(tmp_path: Path) -> None:
    write_pages(tmp_path)
    write_pages(tmp_path)
    page = put(tmp_path / "index.md")
    with pytest.raises(DataError, match=r"index.md was not written by"):
        write_pages(tmp_path)
    record = put(tmp_path / "records" / "package.json")
    with pytest.raises(DataError, match="is not a record"):
        write(record.parent, {"recipe": "package"})
    assert page.read_text() == record.read_text() == "precious"
