from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parsifl.cli.app import app
from parsifl_reproduction.papers import PAPERS
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Job, Recipe, recipes


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["reproduce", *words])
    return result.exit_code, result.stdout, result.stderr


def _one(seed: int, _folder: Path | None) -> dict[str, float]:
    return {"value": float(seed)}


def _skipped(_seed: int, _folder: Path | None) -> dict[str, str]:
    return {SKIPPED: "dataset 'x' is not on this machine."}


def test_the_recipes_are_listed_for_people_and_machines() -> None:
    code, out, _ = invoke("--list", "--json")
    assert code == 0
    assert set(json.loads(out)) == {*recipes(), *(paper.key for paper in PAPERS)}
    text = invoke()[1]
    assert all(name in text for name in recipes())
    assert all(text.count(paper.title) == 1 for paper in PAPERS)


def test_a_recipe_prints_claims_and_keeps_its_results(tmp_path: Path) -> None:
    words = ["perfedmask-table6", "--seeds", "1", "--out", str(tmp_path)]
    code, out, err = invoke(*words, "--json")
    assert code == 0, err
    claims = json.loads(out)["perfedmask-table6"]
    assert [claim["paper"] for claim in claims] == ["8/3", "10/3", "2", "2", "2", "2", "0"]
    assert {claim["verdict"] for claim in claims} == {"held"}
    assert "[1/1]" in err
    assert (
        json.loads((tmp_path / "perfedmask-table6-faithful.json").read_text())["claims"] == claims
    )
    # a second call reads what the first one found
    assert "8/3" in invoke(*words)[1]


def test_mistakes_are_named() -> None:
    code, _, err = invoke("perfedmask-table66")
    assert code == 2
    assert "did you mean 'perfedmask-table6'?" in err
    code, _, err = invoke("perfedmask-table6", "--scale", "huge")
    assert code == 2
    assert "smoke" in err
    code, _, err = invoke("perfedmask-table6", "--seeds", "10", "--max-seeds", "3")
    assert code == 2
    assert "got --max-seeds 3 and --seeds 10" in err
    code, _, err = invoke("perfedmask-table6", "--scale", "smoke", "--record", "x")
    assert code == 2
    assert "gives no verdicts to record" in err


def test_outcomes_are_recorded_and_collected(tmp_path: Path) -> None:
    place, kept = str(tmp_path / "run"), tmp_path / "kept"
    words = ["perfedmask-table6", "--seeds", "1", "--out", place, "--record", str(kept)]
    code, _, err = invoke(*words)
    assert code == 0, err
    first = json.loads((kept / "perfedmask-table6.json").read_text())
    assert first["seeds"] == [0]
    code, _, err = invoke(*words, "--collect")
    assert code == 0, err
    assert "[1/1]" not in err
    assert json.loads((kept / "perfedmask-table6.json").read_text()) == first
    (kept / "index.md").unlink()
    code, out, _ = invoke("--record", str(kept))
    assert code == 0
    assert "index.md" in out
    assert "7 held" in (kept / "index.md").read_text()


def test_jobs_without_a_result_are_named_when_others_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job("long", seed, partial(_one, seed)) for seed in range(14)]
    toy = Recipe(
        "toy", "A toy", "none", lambda c: jobs[: c.seeds], lambda *_: [Claim("so", "", "", "held")]
    )
    monkeypatch.setattr("parsifl_reproduction.cli._chosen", lambda _: [toy])
    words = ["toy", "--out", str(tmp_path)]
    assert invoke(*words, "--seeds", "2")[0] == 0
    code, out, err = invoke(*words, "--seeds", "2", "--collect", "--json")
    assert (code, err) == (0, "")
    (tmp_path / "jobs" / jobs[1].fingerprint / "result.json").unlink()
    code, out, err = invoke(*words, "--seeds", "14", "--collect", "--json")
    assert code == 0
    assert json.loads(out)["toy"][0]["verdict"] == "held"
    assert "no result of 13 jobs" in err
    assert "long, seed 1; long, seed 2" in err
    assert "seed 10; and 3 more" in err


def test_jobs_without_data_are_called_skipped_and_their_reason_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(context: Context) -> list[Job]:
        return [Job("long", seed, partial(_skipped, seed)) for seed in range(context.seeds)]

    toys = [Recipe(name, name, "none", plan, lambda *_: []) for name in ("one", "two")]
    monkeypatch.setattr("parsifl_reproduction.cli._chosen", lambda _: toys)
    words = ["both", "--seeds", "2", "--out", str(tmp_path)]
    code, out, err = invoke(*words)
    assert code == 0
    assert "[1/2] skipped long, seed 0: dataset 'x' is not on this machine\n" in err
    assert "finished" not in err
    closing = err.splitlines()[-1]
    assert closing.startswith("Skipped jobs: 2 (dataset 'x' is not on this machine). ")
    assert "--data-dir" in closing
    code, out, err = invoke(*words, "--collect", "--json")
    assert (code, json.loads(out)) == (0, {"one": [], "two": []})
    assert err.splitlines() == [closing]


def test_a_reason_not_to_run_is_recorded(tmp_path: Path) -> None:
    why = ["--not-run", "DomainNet is not here"]
    code, _, err = invoke("perfedmask-table7", *why)
    assert code == 2
    assert "--record DIR" in err
    assert invoke("perfedmask-table7", *why, "--record", str(tmp_path))[0] == 0
    assert "Not run here: DomainNet is not here." in (tmp_path / "perfedmask.md").read_text()


def test_a_record_directory_is_checked_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        pytest.fail("jobs ran")

    monkeypatch.setattr("parsifl_reproduction.runner.run_recipes", never)
    for name, text in (("notes.json", "{}"), ("index.md", "# Mine")):
        kept = tmp_path / name.replace(".", "-")
        kept.mkdir()
        (kept / name).write_text(text)
        words = ["perfedmask-table6", "--out", str(tmp_path / "out"), "--record", str(kept)]
        code, _, err = invoke(*words)
        assert code == 2
        assert name in err
    words[-1] = str(tmp_path / "index-md" / "index.md")
    code, _, err = invoke(*words)
    assert code == 2
    assert "is not a directory" in err


def test_pages_need_a_directory_and_a_missing_run_needs_a_reason(tmp_path: Path) -> None:
    code, _, err = invoke("--record", str(tmp_path / "none"))
    assert code == 2
    assert "does not exist" in err
    words = ["perfedmask-table6", "--record", str(tmp_path / "none")]
    code, _, err = invoke(*words, "--not-run", " ")
    assert code == 2
    assert "needs a reason" in err
    assert not (tmp_path / "none").exists()


def test_an_interrupted_reproduction_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parsifl_reproduction.runner.run_recipes", stop)
    code, _, err = invoke("perfedmask-table6", "--out", str(tmp_path))
    assert code == 130
    assert "the same command resumes" in err
    assert str(tmp_path) in err


def test_a_record_with_more_seeds_is_not_replaced(tmp_path: Path) -> None:
    place, kept = str(tmp_path / "run"), tmp_path / "kept"
    words = ["perfedmask-table6", "--out", place, "--record", str(kept)]
    assert invoke(*words, "--seeds", "1")[0] == 0
    file = kept / "perfedmask-table6.json"
    saved = json.loads(file.read_text())
    replaced = {**saved, "seeds": [0, 1, 2]}  # one seed was asked for, two were replacements
    file.write_text(json.dumps(replaced))
    assert invoke(*words, "--seeds", "1")[0] == 0
    command = saved["command"].replace("--seeds 1", "--seeds 3")
    file.write_text(json.dumps({**saved, "command": command}))
    for more in (["--seeds", "2"], ["--seeds", "3", "--not-run", "no time"]):
        code, _, err = invoke(*words, *more)
        assert code == 2
        assert "claims from --seeds 3, which would be lost" in " ".join(err.split())
    assert json.loads(file.read_text())["command"] == command


def test_a_record_with_further_seeds_is_not_replaced_by_one_with_fewer(tmp_path: Path) -> None:
    place, kept = str(tmp_path / "run"), tmp_path / "kept"
    words = ["perfedmask-table6", "--out", place, "--record", str(kept)]
    assert invoke(*words, "--seeds", "2", "--max-seeds", "10")[0] == 0
    for fewer in (["--seeds", "3"], ["--seeds", "2", "--max-seeds", "9"]):
        code, _, err = invoke(*words, *fewer)
        assert code == 2
        assert "claims from --seeds 2 --max-seeds 10" in " ".join(err.split())
    # every claim has 10 seeds now, and 3 would be fewer, however many may follow
    assert invoke(*words, "--seeds", "10")[0] == 0
    assert invoke(*words, "--seeds", "3", "--max-seeds", "20")[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "1", "--max-seeds", "20"], "--seeds 2 or more"),
        (["--seeds", "5", "--max-seeds", "3"], "must be at least --seeds"),
        (["--scale", "smoke", "--max-seeds", "20"], "gives none"),
    ],
)
def test_max_seeds_that_cannot_be_used_is_an_error(words: list[str], message: str) -> None:
    code, _, err = invoke("perfedmask-table6", *words)
    assert code == 2
    assert message in " ".join(err.split())


def test_an_output_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, _, err = invoke("perfedmask-table6", "--seeds", "1", "--out", str(file))
    assert code == 2
    assert f"--out {file} is a file; choose a directory" in err
