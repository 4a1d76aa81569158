"""What a recipe is, where recipes are found, and how one is run.

A recipe plans jobs (one a method and seed, say), each of which returns JSON values, and concludes
claims from the results. Results are kept in a folder, so that a killed reproduction goes on.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from parsifl.core.errors import CheckpointError, ConfigError, unknown
from parsifl.engine.owned import replace_file
from parsifl.engine.study import run_jobs
from parsifl_reproduction.machine import machine

Scale = Literal["small", "full"]
Verdict = Literal["held", "undecided", "did not hold", "not run"]
Values = dict[str, Any]
SKIPPED = "skipped"
"""The key under which a job that could not run (data that are missing, say) tells why."""


@dataclass(frozen=True)
class Context:
    """How a recipe is asked to run.

    Attributes
    ----------
    scale
        "small" ends on two cores within 20 minutes; "full" is the paper's own size.
    seeds
        How many repetitions give the spread.
    data_dir
        A folder with data sets that is looked at first; None: the usual places.
    """

    scale: Scale = "small"
    seeds: int = 3
    data_dir: str | None = None


@dataclass(frozen=True)
class Job:
    """One unit of work; `run` gets a folder of its own (or None) and returns JSON values."""

    label: str
    seed: int
    run: Callable[[Path | None], Values]


@dataclass(frozen=True)
class Result:
    """The values that a job returned; `made` tells when, how long and on which machine."""

    label: str
    seed: int
    values: Values
    made: Values | None = None


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, its number, ours (with spread), and whether it held."""

    statement: str
    paper: str
    ours: str
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """A table or figure: `plan` says what to run, `conclude` what follows from the results."""

    name: str
    title: str
    paper: str
    plan: Callable[[Context], Sequence[Job]]
    conclude: Callable[[Context, Sequence[Result]], Sequence[Claim]]


@cache
def recipes() -> dict[str, Recipe]:
    """Return every recipe by name, from the modules of this package."""
    package = importlib.import_module("parsifl_reproduction")
    found: dict[str, Recipe] = {}
    for module in pkgutil.iter_modules(package.__path__):
        members = importlib.import_module(f"{package.__name__}.{module.name}")
        for recipe in getattr(members, "RECIPES", ()):
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def find(name: str) -> Recipe:
    """Return a recipe by name."""
    known = recipes()
    if name not in known:
        raise ConfigError(unknown("recipe", name, known))
    return known[name]


def reproduce(
    recipe: Recipe,
    context: Context,
    folder: Path | None = None,
    progress: Callable[[Job, int, int], None] | None = None,
    processes: int = 1,
) -> tuple[list[Result], list[Claim]]:
    """Run the jobs that have no result yet, in parallel processes; then evaluate the claims."""
    jobs = recipe.plan(context)
    known = [_finished(job, context, folder) for job in jobs]
    # what was missing may be there by now
    open_jobs = [at for at, found in enumerate(known) if found is None or SKIPPED in found.values]
    if processes > 1:  # a job may hold what cannot be sent to a process; its number can
        work = [partial(_run_numbered, recipe.name, context, at, folder) for at in open_jobs]
    else:
        work = [partial(_run_job, jobs[at], context, folder) for at in open_jobs]
    for done, (number, result) in enumerate(run_jobs(work, processes), start=1):
        known[open_jobs[number]] = result
        if progress is not None:
            progress(jobs[open_jobs[number]], done, len(work))
    results = [found for found in known if found is not None]
    return results, _judge(recipe, context, results, folder)


def collect(recipe: Recipe, context: Context, folder: Path) -> tuple[list[Result], list[Claim]]:
    """Judge the claims by the jobs that a folder has the results of; nothing is run."""
    jobs = recipe.plan(context)
    found = [_finished(job, context, folder) for job in jobs]
    results = [result for result in found if result is not None]
    if not results:
        raise ConfigError(f"{folder} holds no finished job of {recipe.name} at this scale")
    try:
        return results, _judge(recipe, context, results, folder)
    except (LookupError, ValueError, ArithmeticError) as error:
        if len(results) == len(jobs):
            raise
        raise ConfigError(
            f"{folder} has {len(results)} of {len(jobs)} jobs of {recipe.name}, too few to judge "
            "its claims; finish them with `parsifl reproduce`, or ask for fewer --seeds"
        ) from error


def missing(recipe: Recipe, context: Context, folder: Path) -> list[Job]:
    """Return the jobs that a folder has no result of: not begun, or interrupted."""
    return [job for job in recipe.plan(context) if _finished(job, context, folder) is None]


def _judge(
    recipe: Recipe, context: Context, results: Sequence[Result], folder: Path | None
) -> list[Claim]:
    claims = list(recipe.conclude(context, results))
    if folder is not None:
        summary = {"recipe": recipe.name, **asdict(context), "claims": [asdict(c) for c in claims]}
        _check_claims(folder / "claims.json")
        replace_file(folder / "claims.json", json.dumps(summary, indent=1).encode())
    return claims


def _check_claims(file: Path) -> None:
    """Raise CheckpointError if there is a file of this name which a recipe has not written."""
    try:
        known = not file.exists() or "recipe" in json.loads(file.read_text())
    except (ValueError, TypeError):
        known = False
    if not known:
        raise CheckpointError(
            f"{file} was not written by `parsifl reproduce` and would be overwritten; choose "
            "another folder"
        )


def _place(job: Job, folder: Path) -> Path:
    return folder / re.sub(r"[^\w.=-]+", "_", f"{job.label}-seed{job.seed}")


def _finished(job: Job, context: Context, folder: Path | None) -> Result | None:
    """Return the result that a folder holds; None: the job has not ended yet."""
    if folder is None:
        return None
    place = _place(job, folder)
    done, made = (place / f"{kind}-{context.scale}.json" for kind in ("result", "made"))
    if not done.exists():
        return None
    try:
        values = json.loads(done.read_text())
        about = json.loads(made.read_text()) if made.exists() else {"finished": _date(done)}
    except ValueError as error:
        raise CheckpointError(
            f"{done} is damaged: {error}; delete it to run the job anew"
        ) from None
    return Result(job.label, job.seed, values, about)


def _run_job(job: Job, context: Context, folder: Path | None) -> Result:
    if folder is None:
        return Result(job.label, job.seed, job.run(None))
    place = _place(job, folder)
    place.mkdir(parents=True, exist_ok=True)
    start, spent = time.monotonic(), time.process_time()
    values = job.run(place)
    made = {
        "finished": datetime.now(UTC).isoformat(),
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(time.process_time() - spent, 3),
        **machine(),
    }
    # the result comes last: it says that the job has ended
    replace_file(place / f"made-{context.scale}.json", json.dumps(made).encode())
    replace_file(place / f"result-{context.scale}.json", json.dumps(values).encode())
    return Result(job.label, job.seed, values, made)


def _run_numbered(recipe: str, context: Context, number: int, folder: Path | None) -> Result:
    return _run_job(find(recipe).plan(context)[number], context, folder)


def _date(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat()


def by_label(results: Sequence[Result]) -> dict[str, list[Values]]:
    """Group the values of the jobs that ran by label, seeds in order."""
    grouped: dict[str, list[Values]] = {}
    for result in sorted(results, key=lambda found: found.seed):
        if SKIPPED not in result.values:
            grouped.setdefault(result.label, []).append(result.values)
    return grouped


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a mean with its standard deviation over seeds.

    >>> spread([1.0, 3.0])
    '2.00 ± 1.41'
    """
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
