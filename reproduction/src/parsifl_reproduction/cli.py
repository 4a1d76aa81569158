"""`parsifl reproduce`: run a table or figure of a paper and judge its claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl.cli import options
from parsifl.core.errors import ConfigError

if TYPE_CHECKING:
    from parsifl_reproduction.recipe import Claim, Job

SHOWN = 10
"""Most jobs without a result that are named."""


def reproduce(
    name: str | None = typer.Argument(None, help="A recipe; see `parsifl reproduce --list`."),
    scale: str = typer.Option("small", help="small ends within 20 minutes; full is the paper's."),
    seeds: int = typer.Option(3, min=1, help="Repetitions, for the spread."),
    out: Path | None = typer.Option(None, help="Where results are kept; else runs/NAME."),
    data_dir: Path | None = typer.Option(None, help="A folder with data that is looked at first."),
    list_all: bool = typer.Option(False, "--list", help="List the recipes."),
    record: Path | None = typer.Option(
        None, help="A folder that keeps the outcome as NAME.json, with pages; no NAME: only pages."
    ),
    collect: bool = typer.Option(False, "--collect", help="Judge finished jobs; run nothing."),
    not_run: str | None = typer.Option(
        None, "--not-run", help="With --record: keep why this recipe is not run here."
    ),
    jobs: int = options.JOBS,
    reproducible: bool = options.REPRODUCIBLE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Reproduce a table or figure: the claim, the paper's number, ours, and whether it held.

    An interrupted reproduction resumes job by job when it is started again.

    Examples:

      parsifl reproduce --list

      parsifl reproduce fedmac-table1 --seeds 3

      parsifl reproduce fedmac-theorem3 --seeds 3 --record docs/reproduction

      parsifl reproduce perfedmask-table7 --record docs/reproduction --not-run "no DomainNet here"
    """
    from parsifl_reproduction import record as records
    from parsifl_reproduction.pages import write_pages
    from parsifl_reproduction.recipe import Context, find, missing, recipes
    from parsifl_reproduction.recipe import collect as collect_results
    from parsifl_reproduction.recipe import reproduce as run_recipe

    if name is None and record is not None and not list_all:
        for page in write_pages(record):
            typer.echo(f"Wrote {page}")
        return
    if list_all or name is None:
        _list(
            {key: f"{recipe.title} ({recipe.paper})" for key, recipe in recipes().items()}, as_json
        )
        return
    if not_run is not None and record is None:
        raise ConfigError("--not-run needs the folder that keeps the reason: --record DIR")
    if scale not in ("small", "full"):
        raise ConfigError(f"scale must be small or full, got '{scale}'")
    context = Context("small" if scale == "small" else "full", seeds, _text(data_dir))
    place = out or Path("runs") / name

    def progress(job: Job, number: int, total: int) -> None:
        typer.echo(f"[{number}/{total}] finished {job.label}, seed {job.seed}", err=True)

    recipe = find(name)
    if not_run is not None and record is not None:
        records.write(record, records.not_run(recipe, context, not_run))
    else:
        results, claims = (
            collect_results(recipe, context, place)
            if collect
            else run_recipe(recipe, context, place, progress, jobs)
        )
        if collect:
            _tell_missing(missing(recipe, context, place), place)
        _print(claims, as_json)
        if record is not None:
            records.write(record, records.record(recipe, context, results, claims))
    if record is not None:
        write_pages(record)
        typer.echo(f"Wrote {record / name}.json and the pages beside it", err=True)


def _tell_missing(jobs: list[Job], place: Path) -> None:
    if jobs:
        named = "; ".join(f"{job.label}, seed {job.seed}" for job in jobs[:SHOWN])
        more = f"; and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
        typer.echo(
            f"{place} has no result of {len(jobs)} jobs, which count as not run: {named}{more}. "
            "Without --collect they are run, or go on.",
            err=True,
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _list(rows: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for key, title in rows.items():
        typer.echo(f"{key:32s} {title}")


def _print(claims: list[Claim], as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    rows: list[dict[str, Any]] = [asdict(claim) for claim in claims]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("claim", "paper", "ours", "verdict", "note")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("statement", "paper", "ours", "verdict", "note")))
    Console().print(table)
