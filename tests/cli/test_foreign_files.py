"""A run deletes and replaces nothing but its own files, whatever directory it is given."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parsifl.cli.app import app

QUICK = ["--data", "digits", "--clients", "4", "--set", "local_steps=1", "--evaluate-every", "0"]


def run(out: Path, *more: str, algorithm: str = "ditto", rounds: int = 1) -> tuple[int, str]:
    words = ["run", algorithm, *QUICK, "--rounds", str(rounds), "--out", str(out), *more]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint/my-model/weights.bin",
        "checkpoint/weights.bin",
        "checkpoint/clients/part-00000001.safetensors",
        "metrics.jsonl",
        "clients.json",
        "target.json",
        "environment.json",
    ],
)
def test_a_directory_with_our_names_that_is_no_run_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{"precious": 1}\n')
    code, err = run(tmp_path)
    assert code == 2
    assert name.split("/")[0] in err
    assert "no config.toml" in err
    assert "choose another directory" in err
    assert contents(tmp_path) == {name: b'{"precious": 1}\n'}


def test_a_directory_with_other_files_is_accepted_and_they_stay(tmp_path: Path) -> None:
    for name in ("main.py", "checkpoints/a.bin", "notes/checkpoint/b.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    assert run(tmp_path)[0] == 0
    assert before.items() <= contents(tmp_path).items()


def test_what_others_put_into_our_checkpoints_stays(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 0
    foreign = [
        "checkpoint/my-model/weights.bin",
        "checkpoint/round-best/weights.bin",
        "checkpoint/round-00000077/weights.bin",
        "checkpoint/.round-00000078.tmp/weights.bin",
        "checkpoint/clients/part-best.safetensors",
        "checkpoint/clients/part-00000099.safetensors",
        "checkpoint/clients/notes.txt",
    ]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    for rounds in (2, 3, 4):
        assert run(tmp_path, "--resume", rounds=rounds)[0] == 0
    found = contents(tmp_path)
    assert {name: found.get(name) for name in foreign} == dict.fromkeys(foreign, b"precious")
    assert not (tmp_path / "checkpoint" / "round-00000001").exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/clients"])
def test_a_linked_directory_is_rejected(tmp_path: Path, name: str, resume: bool) -> None:
    victim = tmp_path / "victim"
    (victim / "Documents").mkdir(parents=True)
    (victim / "Documents" / "thesis").write_text("precious")
    out = tmp_path / "run"
    if resume:
        assert run(out)[0] == 0
        (out / name).rename(tmp_path / "moved")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to(victim)
    code, err = run(out, *(["--resume"] if resume else []), rounds=2)
    assert code == 2
    assert "symbolic link" in err or "no config.toml" in err
    assert contents(victim) == {"Documents/thesis": b"precious"}


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "clients.json", "target.json", "checkpoint/LATEST"]
)
def test_a_linked_file_is_rejected(tmp_path: Path, name: str) -> None:
    out, victim = tmp_path / "run", tmp_path / "victim"
    assert run(out, "--evaluate-every", "1")[0] == 0
    (out / name).rename(victim)
    (out / name).symlink_to(victim)
    before = victim.read_bytes()
    code, err = run(out, "--resume", "--evaluate-every", "1", rounds=2)
    assert code == 2
    assert "symbolic link" in err
    assert victim.read_bytes() == before


@pytest.mark.parametrize("linked", ["symbolic", "hard"])
def test_temporary_files_do_not_write_through_links(tmp_path: Path, linked: str) -> None:
    out, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("precious")
    out.mkdir()
    for name in (".environment.json.tmp", ".config.toml.tmp", ".metrics.jsonl.tmp"):
        link = out / name
        link.symlink_to(victim) if linked == "symbolic" else link.hardlink_to(victim)
    assert run(out)[0] == 0
    assert victim.read_text() == "precious"


def test_files_with_names_like_temporary_ones_are_kept(tmp_path: Path) -> None:
    names = ["config.toml", "environment.json", "target.json", "metrics.jsonl", "clients.json"]
    theirs = [tmp_path / f".{name}.tmp" for name in names[:-1]]
    for path in theirs:
        path.write_text("precious")
    (tmp_path / f".{names[-1]}.tmp").mkdir()
    assert run(tmp_path, "--evaluate-every", "1")[0] == 0
    assert run(tmp_path, "--evaluate-every", "1", "--resume", rounds=2)[0] == 0
    assert all(path.read_text() == "precious" for path in theirs)
    assert (tmp_path / f".{names[-1]}.tmp").is_dir()


@pytest.mark.parametrize("name", ["../victim", "..", "/etc", "round-1", "round-00000001/../x"])
def test_a_checkpoint_is_looked_for_in_its_own_directory_only(tmp_path: Path, name: str) -> None:
    assert run(tmp_path / "run")[0] == 0
    (tmp_path / "run" / "checkpoint" / "LATEST").write_text(f"{name} 00000000")
    code, err = run(tmp_path / "run", "--resume", rounds=2)
    assert code == 2
    assert "LATEST" in err


def test_an_interrupted_start_does_not_count_as_foreign(tmp_path: Path) -> None:
    assert run(tmp_path / "whole")[0] == 0
    (tmp_path / "run").mkdir()
    made = (tmp_path / "whole" / "environment.json").read_text()
    assert "parsifl" in json.loads(made)
    (tmp_path / "run" / "environment.json").write_text(made)
    (tmp_path / "run" / ".config.toml.tmp").write_text("half")
    assert run(tmp_path / "run")[0] == 0


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for rounds in (1, 2, 3):
        assert run(tmp_path / "run", *(["--resume"] * (rounds > 1)), rounds=rounds)[0] == 0
    place = tmp_path / "run" / "checkpoint"
    assert sorted(p.name for p in place.glob("round-*")) == ["round-00000002", "round-00000003"]
    (place / "round-00000003" / "server.safetensors").write_bytes(b"damaged")
    code, err = run(tmp_path / "run", "--resume", rounds=4)
    assert code == 0, err
    assert err.count("warning") == 1
    assert "round-00000003 cannot be read" in err
    assert "round-00000002" in err
    assert run(tmp_path / "straight", rounds=4)[0] == 0
    for name in ("state.json", "server.safetensors"):
        ours, theirs = (
            json.loads(p.read_text())["server"] if name == "state.json" else p.read_bytes()
            for p in (d / "checkpoint" / "round-00000004" / name for d in tmp_path.iterdir())
        )
        assert ours == theirs
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
