"""Run the jobs of recipes, share them by content, and evaluate the claims.

Results are kept in a directory, one folder per job. An interrupted reproduction resumes job by job,
and a job that two recipes plan runs once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from parsifl.core.errors import CheckpointError, ConfigError
from parsifl.engine.safe_files import replace_file
from parsifl.engine.study import run_jobs
from parsifl_reproduction.machine import machine
from parsifl_reproduction.recipe import OURS, SKIPPED, Claim, Context, Job, Recipe, Result, Values

Progress = Callable[[Job, Values, int, int], None]
"""Called with each job that has run, its values, its number and the number of jobs."""
SEEDS = (3, 10, 20)
"""The steps in which an undecided comparison gets seeds (ADR 15)."""


def run_open_jobs(
    jobs: Sequence[Job], folder: Path, progress: Progress | None = None, processes: int = 1
) -> None:
    """Run the jobs that have no result in `folder` yet, in parallel processes; each work once."""
    open_jobs: dict[str, Job] = {}
    for job in jobs:
        found = _finished(job, folder)
        if found is None or SKIPPED in found.values:  # the missing data may have arrived
            open_jobs.setdefault(job.fingerprint, job)
    waiting = list(open_jobs.values())
    work = [partial(_run_job, job, folder) for job in waiting]
    for done, (number, values) in enumerate(run_jobs(work, processes), start=1):
        if progress is not None:
            progress(waiting[number], values, done, len(work))


def run_recipes(
    recipes: Sequence[Recipe],
    context: Context,
    folder: Path,
    progress: Progress | None = None,
    processes: int = 1,
) -> None:
    """Run the open jobs of recipes: first what they plan, then what follows from that."""
    asked: set[str] = set()
    while True:
        known = [job for recipe in recipes for job in jobs(recipe, context, folder)]
        new = [job for job in known if job.fingerprint not in asked]
        if not new:
            break
        asked.update(job.fingerprint for job in new)
        run_open_jobs(new, folder, progress, processes)


def reproduce(
    recipe: Recipe,
    context: Context,
    folder: Path,
    progress: Progress | None = None,
    processes: int = 1,
) -> tuple[list[Result], list[Claim]]:
    """Run the open jobs of a recipe; then evaluate its claims."""
    run_recipes([recipe], context, folder, progress, processes)
    return collect(recipe, context, folder)


def jobs(recipe: Recipe, context: Context, folder: Path) -> list[Job]:
    """Return the jobs that a recipe plans and, as far as these have finished, those that follow.

    Last come further seeds of undecided comparisons, if the context allows them.
    """
    known = list(recipe.plan(context))
    while len(results := _results(known, folder)) == len(known):
        marks = {_mark(job) for job in known}
        following = [each for each in recipe.follow(context, results) if _mark(each) not in marks]
        new = following or _further_seeds(recipe, context, results, marks)
        if not new:
            break
        known += new
    return known


def _further_seeds(
    recipe: Recipe, context: Context, results: Sequence[Result], marks: set[tuple[str, int]]
) -> list[Job]:
    """Return the next step of seeds for the runs of undecided claims, up to `max_seeds`."""
    if context.max_seeds is None or context.smoke:
        return []
    claims = recipe.conclude(context, results)
    undecided = [c for c in claims if c.verdict == "undecided" and c.counted in ("", OURS)]
    labels = {label for claim in undecided for label in claim.runs or ()}
    anything = any(claim.runs is None for claim in undecided)
    for seeds in sorted({*(s for s in SEEDS if s < context.max_seeds), context.max_seeds}):
        wider = replace(context, seeds=max(seeds, context.seeds))
        further = {
            _mark(job): job
            for job in (*recipe.plan(wider), *recipe.follow(wider, results))
            if (anything or job.label in labels) and _mark(job) not in marks
        }
        if further:
            return list(further.values())
    return []


def _mark(job: Job) -> tuple[str, int]:
    return job.label, job.seed


def _results(jobs: Sequence[Job], folder: Path) -> list[Result]:
    found = (_finished(job, folder) for job in jobs)
    return [result for result in found if result is not None]


def collect(recipe: Recipe, context: Context, folder: Path) -> tuple[list[Result], list[Claim]]:
    """Evaluate the claims by the jobs that have results in a folder; nothing runs."""
    wanted = jobs(recipe, context, folder)
    results = _results(wanted, folder)
    if not results:
        raise ConfigError(f"{folder} holds no finished job of {recipe.name} at this scale")
    try:
        return results, _evaluate(recipe, context, results, folder)
    except (LookupError, ValueError, ArithmeticError) as error:
        if len(results) == len(wanted):
            raise
        raise ConfigError(
            f"{folder} has {len(results)} of {len(wanted)} jobs of {recipe.name}, too few to "
            "evaluate its claims; finish them with `parsifl reproduce`, or ask for fewer --seeds"
        ) from error


def missing(recipe: Recipe, context: Context, folder: Path) -> list[Job]:
    """Return the jobs without a result in a folder: not started, or interrupted."""
    return [job for job in jobs(recipe, context, folder) if _finished(job, folder) is None]


def skipped(recipe: Recipe, context: Context, folder: Path) -> dict[str, str]:
    """Return why jobs could not run, by the fingerprint of the job."""
    found = {job.fingerprint: _finished(job, folder) for job in jobs(recipe, context, folder)}
    return {
        fingerprint: str(result.values[SKIPPED])
        for fingerprint, result in found.items()
        if result is not None and SKIPPED in result.values
    }


def _evaluate(
    recipe: Recipe, context: Context, results: Sequence[Result], folder: Path
) -> list[Claim]:
    claims = list(recipe.conclude(context, results))
    if context.smoke:
        claims = [replace(claim, verdict="none") for claim in claims]
    file = folder / f"{recipe.name}-{context.scale}.json"
    _check_claims(file)
    summary = {"recipe": recipe.name, **asdict(context), "claims": [asdict(c) for c in claims]}
    replace_file(file, json.dumps(summary, indent=1).encode())
    return claims


def _check_claims(file: Path) -> None:
    """Raise CheckpointError if a file of this name exists that a recipe has not written."""
    try:
        known = not file.exists() or "recipe" in json.loads(file.read_text())
    except (ValueError, TypeError):
        known = False
    if not known:
        raise CheckpointError(
            f"{file} was not written by `parsifl reproduce` and would be overwritten; choose "
            "another folder"
        )


def _finished(job: Job, folder: Path) -> Result | None:
    """Return the result that a folder holds; None: the job has not finished yet."""
    done = folder / "jobs" / job.fingerprint / "result.json"
    if not done.exists():
        return None
    try:
        saved = json.loads(done.read_text())
        if not saved["values"] or not saved["made"]:
            raise ValueError("values or their origin are missing")
        return Result(job.label, job.seed, {**saved["values"]}, {**saved["made"]})
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{done} is damaged: {error}; delete it to run the job again"
        ) from None


def _run_job(job: Job, folder: Path) -> Values:
    place = folder / "jobs" / job.fingerprint
    place.mkdir(parents=True, exist_ok=True)
    resumed = any(file.name != "result.json" for file in place.iterdir())
    start, spent = time.monotonic(), time.process_time()
    values = job.run(place)
    made = {
        "label": job.label,
        "finished": datetime.now(UTC).isoformat(),
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(time.process_time() - spent, 3),
        "resumed": resumed,  # an earlier attempt spent further seconds
        **machine(),
    }
    # the result comes last: it says that the job has finished
    result = {"values": values, "made": made}
    replace_file(place / "result.json", json.dumps(result).encode())
    return values
