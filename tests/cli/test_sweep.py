from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from parsifl.cli.app import app

BASE = ["--data", "digits", "--clients", "4", "--rounds", "2", "--set", "local_steps=2"]


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sweep", *words])
    return result.exit_code, result.stdout, result.stderr


def test_a_sweep_runs_the_grid_and_names_the_best(tmp_path: Path) -> None:
    words = ["fedavg", *BASE, "--grid", "lr=0.0001,0.5", "--seeds", "2", "--out", str(tmp_path)]
    code, out, err = invoke(*words, "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["settings"] for row in rows] == [{"lr": 0.0001}, {"lr": 0.5}]
    assert [row["best"] for row in rows] == [False, True]
    assert all(len(row["runs"]) == 2 for row in rows)
    assert {row["chosen_by"] for row in rows} == {"validation"}
    assert "optimistic" not in err
    assert (tmp_path / "lr=0.5" / "seed-1" / "metrics.jsonl").exists()


def test_a_sweep_takes_the_options_of_a_run(tmp_path: Path) -> None:
    words = ["--test", "0.5", "--precision", "float16", "--executor", "loop", "--train-scores"]
    code, _, err = invoke("fedavg", *BASE, *words, "--grid", "lr=0.1", "--out", str(tmp_path))
    assert code == 0, err
    config = (tmp_path / "lr=0.1" / "seed-0" / "config.toml").read_text()
    assert 'precision = "float16"' in config
    assert 'executor = "loop"' in config
    assert "train = true" in config
    assert "test = 0.5" in config or 'test = "0.5"' in config


def test_a_killed_sweep_resumes(tmp_path: Path) -> None:
    words = ["fedavg", *BASE, "--out", str(tmp_path)]
    assert invoke(*words, "--grid", "lr=0.1")[0] == 0
    finished = (tmp_path / "lr=0.1" / "seed-0" / "metrics.jsonl").read_text()
    code, _, err = invoke(*words, "--grid", "lr=0.1,0.2")
    assert code == 2
    assert "--resume" in err
    assert invoke(*words, "--grid", "lr=0.1,0.2", "--resume")[0] == 0
    assert (tmp_path / "lr=0.1" / "seed-0" / "metrics.jsonl").read_text() == finished
    assert (tmp_path / "lr=0.2" / "seed-0" / "metrics.jsonl").exists()


def test_a_bad_point_is_refused_before_anything_runs(tmp_path: Path) -> None:
    code, _, err = invoke("fedavg", *BASE, "--grid", "lr=0.1,-1", "--out", str(tmp_path / "new"))
    assert code == 2
    assert "greater than 0" in err
    assert not (tmp_path / "new").exists()


def test_a_misspelt_setting_of_the_run_is_named(tmp_path: Path) -> None:
    out = str(tmp_path / "new")
    code, _, err = invoke("fedavg", *BASE, "--grid", "upload=none,topk", "--out", out)
    assert (code, "did you mean 'uploads'?" in err) == (2, True)
    assert not (tmp_path / "new").exists()


def test_a_sweep_that_could_not_choose_is_refused_before_anything_runs(tmp_path: Path) -> None:
    words = [
        "fedavg",
        *BASE,
        "--grid",
        "lr=0.1",
        "--target",
        "best",
        "--out",
        str(tmp_path / "new"),
    ]
    code, _, err = invoke(*words)
    assert code == 2
    assert "'best' is not one of 'personal', 'global'" in err
    words[words.index("--target") :] = ["--evaluate-every", "0", "--out", str(tmp_path / "new")]
    code, _, err = invoke(*words)
    assert code == 2
    assert "--evaluate-every must be at least 1" in err
    assert not (tmp_path / "new").exists()


def test_a_method_without_a_global_model_cannot_be_judged_on_it(tmp_path: Path) -> None:
    words = ["local", *BASE, "--grid", "lr=0.1", "--target", "global", "--out", str(tmp_path)]
    code, _, err = invoke(*words)
    assert code == 2
    assert "global" in err


def test_choosing_by_test_rows_must_be_asked_for_and_is_said(tmp_path: Path) -> None:
    words = ["fedavg", *BASE, "--grid", "lr=0.1", "--validation", "0", "--out", str(tmp_path)]
    code, out, err = invoke(*words)
    assert code == 0, err
    assert "Its score is optimistic" in err
    assert "on test rows" in out


def test_an_output_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, _, err = invoke("fedavg", *BASE, "--grid", "lr=0.1", "--out", str(file))
    assert code == 2
    assert f"--out {file} is a file; choose a directory" in err


def test_a_sweep_that_failed_in_its_first_round_resumes_with_corrected_options(
    tmp_path: Path,
) -> None:
    out = tmp_path / "sweep"
    words = ["fedavg", "--data", "digits", "--clients", "4", "--rounds", "1"]
    words += ["--grid", "local_steps=1", "--precision", "float16", "--out", str(out), "--resume"]
    code, _, err = invoke(*words, "--set", "lr=1e7")
    assert code == 2
    assert "float16" in err
    assert (out / "local_steps=1" / "seed-0" / "config.toml").exists()
    code, _, err = invoke(*words, "--set", "lr=0.1")
    assert code == 0, err
