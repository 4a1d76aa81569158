"""Trials, without a deployment: a pretended cluster that tells how it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

from parsifl.core.errors import CapabilityError, CheckpointError, ConfigError, ParsiflError
from parsifl.engine.experiment import Experiment
from parsifl.flower import cluster
from parsifl.flower.cluster import parsed, run_on_flower
from parsifl.flower.settings import DONE_FILE, ERROR_FILE, PROCESS_FILE

CHOSEN = Experiment("fedavg", data="digits", clients=2, rounds=1)


class Pretended:
    """Stands in for a cluster whose run ends at once."""

    made: list[dict[str, Any]]
    ending = DONE_FILE

    def __init__(self, folder: Path, clients: int, **more: Any) -> None:
        self._out = folder.parent
        self.made.append({"clients": clients, **more})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""

    def submit(self, _: Path) -> str:
        (self._out / PROCESS_FILE).write_text("12")
        (self._out / self.ending).write_text("client 1 is gone\n")
        return "1"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr("parsifl.flower.cluster.Cluster", Pretended)
    monkeypatch.setattr(Pretended, "made", [], raising=False)
    return Pretended.made


def test_an_error_of_flower_is_shown_in_its_own_words() -> None:
    answer = '{"success": false, "error-message": "The value for key plan needs to be a string"}'
    with pytest.raises(ParsiflError, match="flwr run failed: The value for key plan needs"):
        parsed("run", f"Loading project\n{answer}")
    with pytest.raises(ParsiflError, match="flwr list failed:\nno connection"):
        parsed("list", "no connection")
    assert parsed("run", 'Success\n{"success": true, "run-id": "7"}')["run-id"] == "7"


def test_files_of_a_trial_are_private(tmp_path: Path) -> None:
    cluster.Cluster(tmp_path / "flower", 1, secure=False)
    assert (tmp_path / "flower").stat().st_mode & 0o777 == 0o700


def test_nodes_read_the_data_where_the_user_says(
    tmp_path: Path, made: list[dict[str, Any]]
) -> None:
    run_on_flower(CHOSEN, tmp_path / "run", data_dir=tmp_path / "data")
    (cluster,) = made
    assert cluster["variables"] == {"PARSIFL_DATA": str(tmp_path / "data")}
    assert cluster["secure"] is True


def test_an_error_that_is_written_while_flower_is_asked_is_the_one_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Pretended):
        def status(self, _: str) -> str:
            (self._out / ERROR_FILE).write_text("site 2 refuses\n")
            return "finished:failed"

    monkeypatch.setattr(Failing, "made", [], raising=False)
    monkeypatch.setattr(cluster, "_STATUS_SECONDS", 0.0)
    with pytest.raises(ParsiflError, match=r"^site 2 refuses$"):
        cluster.follow(Failing(tmp_path / "flower", 2), "1", tmp_path)  # type: ignore[arg-type]


def test_mistakes_show_before_anything_is_started(
    tmp_path: Path, made: list[dict[str, Any]]
) -> None:
    with pytest.raises(CapabilityError, match="FedGradMP"):
        run_on_flower(
            Experiment("fedgradmp", data="digits", clients=2, model="mlp"), tmp_path / "run"
        )
    with pytest.raises(ConfigError, match="rate"):
        run_on_flower(Experiment("fedavg", {"rate": 1}), tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    with pytest.raises(CheckpointError, match="already holds a run"):
        run_on_flower(CHOSEN, tmp_path / "run")
    assert made == []
    assert not (tmp_path / "run" / "flower").exists()


def test_a_simulation_without_ray_names_the_extra(
    tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parsifl.flower.cluster.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"parsifl\[flower-sim\]"):
        run_on_flower(CHOSEN, tmp_path / "run", simulation=True)
    assert made == []


def test_why_a_run_failed_is_told(
    tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretended, "ending", ERROR_FILE)
    with pytest.raises(ParsiflError, match="client 1 is gone"):
        run_on_flower(CHOSEN, tmp_path / "run")
    monkeypatch.setattr(Pretended, "ending", DONE_FILE)
    run_on_flower(CHOSEN, tmp_path / "run", resume=True)  # the old reason is forgotten
    assert len(made) == 2
