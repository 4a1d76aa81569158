from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from parsifl.core.errors import CheckpointError, ConfigError
from parsifl_reproduction.comparison import at_grid_end, compare
from parsifl_reproduction.recipe import (
    SKIPPED,
    Claim,
    Context,
    Job,
    Recipe,
    Result,
    Values,
    by_label,
    choosing,
    comparing,
    find,
)
from parsifl_reproduction.runner import collect, jobs, missing, reproduce

RUNS: list[int] = []
"""The seeds of the jobs that ran, in order."""
MISSING: set[str] = set()


def _work(name: str, seed: int, _context: Context, _folder: Path | None) -> Values:
    RUNS.append(seed)
    return {SKIPPED: "no data"} if name in MISSING else {"value": 1.5 * seed}


def _plan(context: Context) -> list[Job]:
    return [
        Job("a / b", seed, partial(_work, "toy", seed, context)) for seed in range(context.seeds)
    ]


def _conclude(_context: Context, results: Sequence[Result]) -> list[Claim]:
    found = [result.values.get("value") for result in results]
    return [Claim("it is so", "1", str(found), "held")]


TOY = Recipe("toy", "A toy", "none", _plan, _conclude)


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RUNS.clear()
    MISSING.clear()


def test_a_finished_job_is_not_run_again(tmp_path: Path) -> None:
    first, _ = reproduce(TOY, Context(seeds=2), tmp_path)
    again, claims = reproduce(TOY, Context(seeds=3), tmp_path)
    assert RUNS == [0, 1, 2]
    assert again[:2] == first
    assert claims[0].ours == "[0.0, 1.5, 3.0]"
    assert json.loads((tmp_path / "toy-faithful.json").read_text())["seeds"] == 3


def test_a_job_that_lacked_its_data_is_tried_again(tmp_path: Path) -> None:
    MISSING.add("toy")
    reproduce(TOY, Context(seeds=1), tmp_path)
    MISSING.clear()
    results, _ = reproduce(TOY, Context(seeds=1), tmp_path)
    assert results[0].values == {"value": 0.0}
    assert results[0].made is not None
    assert results[0].made["resumed"] is False


def test_results_say_when_and_on_what_they_were_made(tmp_path: Path) -> None:
    results, _ = reproduce(TOY, Context(seeds=1), tmp_path)
    made = results[0].made
    assert made is not None
    assert {"finished", "seconds", "processor", "cores", "torch"} <= set(made)
    assert made["resumed"] is False


def test_a_job_that_resumes_an_interrupted_one_says_so(tmp_path: Path) -> None:
    """Its seconds are not those of the whole work."""
    place = tmp_path / "jobs" / _plan(Context(seeds=1))[0].fingerprint
    place.mkdir(parents=True)
    (place / "checkpoint").write_text("")
    results, _ = reproduce(TOY, Context(seeds=1), tmp_path)
    assert results[0].made is not None
    assert results[0].made["resumed"] is True


def test_collecting_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no finished job of toy"):
        collect(TOY, Context(), tmp_path)
    reproduce(TOY, Context(seeds=2), tmp_path)
    results, claims = collect(TOY, Context(seeds=3), tmp_path)
    assert RUNS == [0, 1]
    assert [result.seed for result in results] == [0, 1]
    assert claims[0].verdict == "held"


def test_too_few_jobs_to_evaluate_are_named(tmp_path: Path) -> None:
    reproduce(TOY, Context(seeds=1), tmp_path)

    def conclude(_context: Context, results: Sequence[Result]) -> list[Claim]:
        raise KeyError(len(results))

    strict = Recipe("toy", "A toy", "none", _plan, conclude)
    with pytest.raises(ConfigError, match="1 of 2 jobs of toy"):
        collect(strict, Context(seeds=2), tmp_path)


def test_recipes_share_jobs_by_content_whatever_their_label(tmp_path: Path) -> None:
    def plan(context: Context) -> list[Job]:
        return [Job("another name", 0, partial(_work, "toy", 0, context))]

    other = Recipe("other", "Another", "none", plan, _conclude)
    reproduce(TOY, Context(seeds=1), tmp_path)
    results, _ = reproduce(other, Context(seeds=5, data_dir="elsewhere"), tmp_path)
    assert RUNS == [0]
    assert (results[0].label, results[0].values) == ("another name", {"value": 0.0})
    reproduce(other, Context("full", seeds=1), tmp_path)  # another scale is other work
    assert RUNS == [0, 0]


def test_further_jobs_follow_from_the_results_of_the_plan(tmp_path: Path) -> None:
    def follow(context: Context, results: Sequence[Result]) -> list[Job]:
        best = max(choosing(results), key=lambda result: float(result.values["value"])).seed
        return [Job("further", 10 + best, partial(_work, "toy", 10 + best, context))]

    staged = replace(TOY, follow=follow)
    context = Context(seeds=3)
    assert len(jobs(staged, context, tmp_path)) == 3  # nothing is known before the plan has run
    results, _ = reproduce(staged, context, tmp_path)
    assert RUNS == [0, 1, 2, 12]
    assert [result.label for result in results][-1] == "further"
    assert not missing(staged, context, tmp_path)
    reproduce(staged, context, tmp_path)
    assert RUNS == [0, 1, 2, 12]


LEADS: dict[str, list[float]] = {}
"""How far the second run of `RACE` leads the first one, by seed; the last one repeats."""


def _score(name: str, seed: int, _context: Context, _folder: Path | None) -> Values:
    RUNS.append(seed)
    leads = LEADS.get(name, [0.0])
    return {"value": 10.0 + leads[min(seed, len(leads) - 1)]}


def _plan_race(context: Context) -> list[Job]:
    return [
        Job(name, seed, partial(_score, name, seed, context))
        for seed in range(context.seeds)
        for name in ("base", "fast", "slow")
    ]


def _conclude_race(_context: Context, results: Sequence[Result]) -> list[Claim]:
    grouped = by_label(results)
    base, fast, slow = ([r["value"] for r in grouped[name]] for name in ("base", "fast", "slow"))
    return [
        compare("fast is ahead", "", fast, base, runs=("base", "fast")),
        compare("slow is behind", "", base, slow, runs=("base", "slow")),
    ]


RACE = Recipe("race", "A race", "none", _plan_race, _conclude_race)


@pytest.mark.parametrize(
    ("leads", "seeds", "verdict"),
    [
        ([5.0, 4.0, -0.1, 5.0, 5.1, 4.9], 10, "held"),
        ([5.0, -5.0, 4.0, -4.0, 3.0, -3.0, 5.0, -4.0, 2.0, -4.0, 1.0, -1.0], 20, "tie"),
        ([5.0, 4.0, 5.0], 3, "held"),
    ],
)
def test_an_undecided_comparison_gets_seeds_until_it_is_decided(
    leads: list[float], seeds: int, verdict: str, tmp_path: Path
) -> None:
    LEADS.update(fast=leads, slow=[-1.0])
    _, claims = reproduce(RACE, Context(seeds=3, max_seeds=20), tmp_path)
    assert [claim.verdict for claim in claims] == [verdict, "held"]
    assert [len(claim.left) for claim in claims] == [seeds, 3]
    assert len(RUNS) == 3 + 2 * seeds  # "slow" is decided by its first seeds
    assert collect(RACE, Context(seeds=3, max_seeds=20), tmp_path)[1] == claims


def test_further_seeds_stop_at_the_number_that_was_asked_for(tmp_path: Path) -> None:
    LEADS.update(fast=[5.0, -5.0, 4.0, -4.0, 3.0], slow=[-1.0])
    _, claims = reproduce(RACE, Context(seeds=3, max_seeds=5), tmp_path)
    assert claims[0].verdict == "undecided"
    assert len(claims[0].left) == 5
    assert len(reproduce(RACE, Context(seeds=3), tmp_path)[1][0].left) == 3


def test_further_seeds_are_not_run_where_they_cannot_decide(tmp_path: Path) -> None:
    def at_end(context: Context, results: Sequence[Result]) -> list[Claim]:
        return [at_grid_end(_conclude_race(context, results)[0], second="lr=1")]

    LEADS.update(fast=[5.0], slow=[-1.0])
    recipe = replace(RACE, conclude=at_end)
    _, claims = reproduce(recipe, Context(seeds=3, max_seeds=20), tmp_path)
    assert claims[0].verdict == "undecided"
    assert len(RUNS) == 9


def test_further_seeds_are_run_where_they_can_confirm_at_the_end_of_a_grid(
    tmp_path: Path,
) -> None:
    def at_end(context: Context, results: Sequence[Result]) -> list[Claim]:
        return [at_grid_end(_conclude_race(context, results)[0], first="lr=1")]

    LEADS.update(fast=[5.0, 4.0, -0.1, 5.0, 5.1, 4.9], slow=[-1.0])
    recipe = replace(RACE, conclude=at_end)
    _, claims = reproduce(recipe, Context(seeds=3, max_seeds=20), tmp_path)
    assert (claims[0].verdict, len(claims[0].left)) == ("held", 10)


def test_a_claim_without_named_runs_repeats_the_whole_recipe(tmp_path: Path) -> None:
    def unnamed(context: Context, results: Sequence[Result]) -> list[Claim]:
        return [replace(claim, runs=None) for claim in _conclude_race(context, results)]

    LEADS.update(fast=[5.0, 4.0, -0.1, 5.0, 5.1, 4.9], slow=[-1.0])
    reproduce(replace(RACE, conclude=unnamed), Context(seeds=3, max_seeds=20), tmp_path)
    assert len(RUNS) == 30


def test_settings_are_compared_on_seeds_that_did_not_choose_them() -> None:
    results = [Result("a", seed, {}) for seed in range(5)]
    assert [result.seed for result in choosing(results)] == [0, 1, 2]
    assert [result.seed for result in comparing(results)] == [3, 4]
    assert [result.seed for result in comparing(results[:3])] == [0, 1, 2]


def test_a_job_that_cannot_be_identified_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot be identified"):
        _ = Job("x", 0, lambda _: {}).fingerprint
    with pytest.raises(TypeError, match="cannot be identified"):
        _ = Job("x", 0, partial(_work, object())).fingerprint  # type: ignore[arg-type]


def test_a_smoke_run_gives_no_verdict(tmp_path: Path) -> None:
    _, claims = reproduce(TOY, Context("smoke", seeds=1), tmp_path)
    assert [claim.verdict for claim in claims] == ["none"]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    reproduce(TOY, Context(seeds=1), tmp_path)
    file = next(tmp_path.rglob("result.json"))
    empty = '{"values": {}, "made": {}}'
    for text in ("{", "[]", '{"values": null, "made": {}}', '{"values": {}}', empty):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"result\.json is damaged"):
            reproduce(TOY, Context(seeds=1), tmp_path)


def test_processes_share_the_jobs_of_a_recipe(tmp_path: Path) -> None:
    context = Context(seeds=1)
    apart, claims = reproduce(find("perfedmask-table6"), context, tmp_path / "two", processes=2)
    alone, same = reproduce(find("perfedmask-table6"), context, tmp_path / "one")
    assert [result.values.keys() for result in apart] == [result.values.keys() for result in alone]
    assert [claim.verdict for claim in claims] == [claim.verdict for claim in same]
    assert all("cpu_seconds" in (result.made or {}) for result in apart)
