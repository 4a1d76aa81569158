from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.folders import costs, make_run

from parsifl.core.errors import CheckpointError
from parsifl.engine import run_dir as load


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    run = load.open_run(make_run(tmp_path / "a", "ditto", seed=3, rounds=4))
    assert (run.algorithm, run.seed, run.score, run.maximize, run.data) == (
        "ditto",
        3,
        "accuracy",
        True,
        "digits",
    )
    assert [round.round for round in run.records] == [1, 2, 3, 4]
    assert len(run.records[0].dropped) == 1
    assert run.records[3].metrics == {"density": 0.25}
    assert run.records[3].scores["personal"]["test"]["accuracy"]["mean"] == pytest.approx(0.848)
    assert run.clients_round == 4
    assert len(run.clients["global", "test"].values["accuracy"]) == 10
    assert run.environment["torch"] == "2.13.0"
    assert run.notes == ()


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lacking = {key: value for key, value in costs(9).items() if key != "round"}
    damaged = [lines[0], "{broken", lines[1], '"text"', json.dumps(lacking), "[" * 100_000]
    (folder / "metrics.jsonl").write_text("\n".join([*damaged, lines[2], lines[2][:50]]))
    run = load.open_run(folder)
    assert [round.round for round in run.records] == [1, 2, 3]
    assert run.notes == ("metrics.jsonl: damaged lines 2, 4, 5, 6, 8 left out",)


def test_a_folder_without_rounds_or_evaluations_is_read_with_a_note(tmp_path: Path) -> None:
    started = make_run(tmp_path / "a", rounds=0)
    (started / "metrics.jsonl").unlink()
    assert load.open_run(started).notes == ("no round has been finished yet",)
    unjudged = load.open_run(make_run(tmp_path / "b", evaluate=False))
    assert unjudged.notes == ("no round has been evaluated yet",)
    assert unjudged.evaluated("global") == []


@pytest.mark.parametrize("content", ["{", "[1]", '{"round": 1, "global": {"test": {}}}'])
def test_damaged_client_scores_are_left_out(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "clients.json").write_text(content)
    run = load.open_run(folder)
    assert run.clients == {}
    assert run.notes == ("clients.json is damaged and left out",)


def test_columns_of_unequal_length_are_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    scores = {"clients": [0, 1], "samples": [1, 1], "accuracy": [0.5]}
    content = json.dumps({"round": 1, "global": {"test": scores}})
    (folder / "clients.json").write_text(content)
    assert load.open_run(folder).clients == {}


def test_not_finite_scores_do_not_count_as_judged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=2, level=float("nan"))
    assert load.open_run(folder).evaluated("personal") == []


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run directory not found"):
        load.open_run(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has a config\.toml"):
        load.open_run(tmp_path)
    with pytest.raises(CheckpointError, match="no run directory was named"):
        load.read_runs([])
    (tmp_path / "config.toml").write_text("[tool]\nname = 'other'\n")
    with pytest.raises(CheckpointError, match=r"no algorithm\.name"):
        load.open_run(tmp_path)
    (tmp_path / "config.toml").write_text("algorithm = = 3")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.open_run(tmp_path)


def test_a_folder_of_run_folders_stands_for_them(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "runs" / "a"), make_run(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "report.html").write_text("")
    assert load.find_runs([tmp_path / "runs", first]) == [first, second]
    assert [run.path for run in load.read_runs([tmp_path / "runs"])] == [first, second]


def test_run_folders_are_found_below_folders(tmp_path: Path) -> None:
    deep = make_run(tmp_path / "sweep" / "lr=0.1" / "seed-0")
    assert load.find_runs([tmp_path]) == [deep]


def test_a_damaged_folder_among_others_is_named(tmp_path: Path) -> None:
    good = make_run(tmp_path / "a")
    (make_run(tmp_path / "b") / "config.toml").write_text("algorithm = = 3")
    (make_run(tmp_path / "c") / "config.toml").unlink()
    left_out: list[str] = []
    assert [run.path for run in load.read_runs([tmp_path], left_out)] == [good]
    assert all(str(tmp_path / name) in note for name, note in zip("bc", left_out, strict=True))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.read_runs([tmp_path])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load.read_runs([good, tmp_path / "b"], left_out)
    (good / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match="no run directory can be read"):
        load.read_runs([tmp_path], left_out)


def test_reading_does_not_load_torch() -> None:
    code = "import sys, parsifl.report, parsifl.report.live; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
