from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from parsifl.core.errors import CheckpointError, ConfigError
from parsifl_reproduction.recipe import (
    SKIPPED,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    collect,
    find,
    reproduce,
)


class Laboratory:
    """A recipe of one job a seed, which counts its runs."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.missing = False
        self.recipe = Recipe("toy", "A toy", "none", self.plan, self.conclude)

    def plan(self, context: Context) -> list[Job]:
        def job(seed: int) -> Job:
            def run(_folder: Path | None) -> Values:
                self.runs.append(seed)
                return {SKIPPED: "no data"} if self.missing else {"value": 1.5 * seed}

            return Job("a / b", seed, run)

        return [job(seed) for seed in range(context.seeds)]

    def conclude(self, _context: Context, results: Sequence[Result]) -> list[Claim]:
        found = [result.values.get("value") for result in results]
        return [Claim("it is so", "1", str(found), "held")]


def test_a_finished_job_is_not_run_again(tmp_path: Path) -> None:
    toy = Laboratory()
    first, _ = reproduce(toy.recipe, Context(seeds=2), tmp_path)
    again, claims = reproduce(toy.recipe, Context(seeds=3), tmp_path)
    assert toy.runs == [0, 1, 2]
    assert again[:2] == first
    assert claims[0].ours == "[0.0, 1.5, 3.0]"
    assert json.loads((tmp_path / "claims.json").read_text())["seeds"] == 3


def test_a_job_that_lacked_its_data_is_tried_again(tmp_path: Path) -> None:
    toy = Laboratory()
    toy.missing = True
    reproduce(toy.recipe, Context(seeds=1), tmp_path)
    toy.missing = False
    results, _ = reproduce(toy.recipe, Context(seeds=1), tmp_path)
    assert results[0].values == {"value": 0.0}


def test_results_say_when_and_on_what_they_were_made(tmp_path: Path) -> None:
    results, _ = reproduce(Laboratory().recipe, Context(seeds=1), tmp_path)
    made = results[0].made
    assert made is not None
    assert {"finished", "seconds", "processor", "cores", "torch"} <= set(made)


def test_collecting_runs_nothing(tmp_path: Path) -> None:
    toy = Laboratory()
    with pytest.raises(ConfigError, match="holds no finished job of toy"):
        collect(toy.recipe, Context(), tmp_path)
    reproduce(toy.recipe, Context(seeds=2), tmp_path)
    results, claims = collect(toy.recipe, Context(seeds=3), tmp_path)
    assert toy.runs == [0, 1]
    assert [result.seed for result in results] == [0, 1]
    assert claims[0].verdict == "held"


def test_too_few_jobs_to_judge_are_named(tmp_path: Path) -> None:
    toy = Laboratory()
    reproduce(toy.recipe, Context(seeds=1), tmp_path)

    def conclude(_context: Context, results: Sequence[Result]) -> list[Claim]:
        raise KeyError(len(results))

    strict = Recipe("toy", "A toy", "none", toy.plan, conclude)
    with pytest.raises(ConfigError, match="1 of 2 jobs of toy"):
        collect(strict, Context(seeds=2), tmp_path)


def test_older_results_have_the_date_of_their_file(tmp_path: Path) -> None:
    toy = Laboratory()
    reproduce(toy.recipe, Context(seeds=1), tmp_path)
    next(tmp_path.rglob("made-small.json")).unlink()
    results, _ = collect(toy.recipe, Context(seeds=1), tmp_path)
    assert results[0].made is not None
    assert set(results[0].made) == {"finished"}


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    toy = Laboratory()
    reproduce(toy.recipe, Context(seeds=1), tmp_path)
    file = next(tmp_path.rglob("result-small.json"))
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"result-small\.json is damaged"):
        reproduce(toy.recipe, Context(seeds=1), tmp_path)


def test_processes_share_the_jobs_of_a_recipe(tmp_path: Path) -> None:
    context = Context(seeds=1)
    apart, claims = reproduce(find("perfedmask-table6"), context, tmp_path / "two", processes=2)
    alone, same = reproduce(find("perfedmask-table6"), context, tmp_path / "one")
    assert [result.values.keys() for result in apart] == [result.values.keys() for result in alone]
    assert [claim.verdict for claim in claims] == [claim.verdict for claim in same]
    assert all("cpu_seconds" in (result.made or {}) for result in apart)
