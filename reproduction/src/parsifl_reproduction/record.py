"""The recorded outcome of a recipe: claims, deviations, command, date, seeds, machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parsifl import __version__
from parsifl.core.errors import DataError
from parsifl.engine.safe_files import replace_file
from parsifl_reproduction.machine import machine
from parsifl_reproduction.recipe import SKIPPED, Claim, Context, Job, Recipe, Result

Record = dict[str, Any]
_MACHINE = ("processor", "cores", "system", "machine", "python", "torch", "numpy", "parsifl")
_NUMBERS = re.compile(r"\[[-\d.e+,\s]+\]")
"""A list of numbers as `json.dumps` writes it."""


def record(
    recipe: Recipe,
    context: Context,
    jobs: Sequence[Job],
    results: Sequence[Result],
    claims: Sequence[Claim],
) -> Record:
    """Return everything that a reader needs to trust the claims or to try them again."""
    made = [result.made or {} for result in results]
    dates = sorted(each["finished"] for each in made if "finished" in each)
    known = next((each for each in made if "processor" in each), machine())
    seconds = [each["seconds"] for each in made if "seconds" in each]
    spent = [each["cpu_seconds"] for each in made if "cpu_seconds" in each]
    return {
        **_head(recipe, context, jobs),
        "jobs": len(jobs),
        "collected": len(results),
        "finished": sum(SKIPPED not in result.values for result in results),
        "skipped": _skipped(results),
        "first": dates[0] if dates else datetime.now(UTC).isoformat(),
        "last": dates[-1] if dates else datetime.now(UTC).isoformat(),
        "seconds": round(sum(seconds), 1) if len(seconds) == len(results) else None,
        "cpu_seconds": round(sum(spent), 1) if len(spent) == len(results) else None,
        "machine": {name: known[name] for name in _MACHINE if name in known},
        "deviations": list(recipe.deviations(context)),
        "claims": [asdict(claim) for claim in claims],
    }


def not_run(recipe: Recipe, context: Context, reason: str) -> Record:
    """Return the record of a recipe that was not run, with the reason."""
    jobs = recipe.plan(context)
    return {
        **_head(recipe, context, jobs),
        "jobs": len(jobs),
        "finished": 0,
        "last": datetime.now(UTC).isoformat(),
        "reason": reason,
        "claims": [],
    }


def asked(record: Record) -> tuple[int, int]:
    """Return how many seeds were asked for: of every run, and at most."""
    found = [int(number) for number in re.findall(r"seeds (\d+)", record.get("command", ""))]
    return (found[0], found[-1]) if found else (0, 0)


def _head(recipe: Recipe, context: Context, jobs: Sequence[Job]) -> Record:
    scale = "" if context.scale == Context().scale else f" --scale {context.scale}"
    more = "" if context.max_seeds is None else f" --max-seeds {context.max_seeds}"
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "command": f"parsifl reproduce {recipe.name}{scale} --seeds {context.seeds}{more}",
        "scale": context.scale,
        "seeds": sorted({job.seed for job in jobs}),
        "version": __version__,
    }


def _skipped(results: Sequence[Result]) -> dict[str, str]:
    """Return why jobs did not run, by label."""
    return {
        result.label: str(result.values[SKIPPED]) for result in results if SKIPPED in result.values
    }


def write(folder: Path, found: Record) -> Path:
    """Keep a record in a folder; a newer one replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    read_all(folder)  # files of others are rejected, not replaced
    file = folder / f"{found['recipe']}.json"
    text = json.dumps(found, indent=1, ensure_ascii=False)
    replace_file(file, (_NUMBERS.sub(_on_one_line, text) + "\n").encode())
    return file


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers.group().split()).replace("[ ", "[").replace(" ]", "]")


def read_all(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by recipe."""
    found: dict[str, Record] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            values = json.loads(file.read_text())
            found[values["recipe"]] = values
        except (ValueError, LookupError, TypeError):
            raise DataError(f"{file} is not a record of `parsifl reproduce --record`") from None
    return found
