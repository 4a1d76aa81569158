"""`parsifl reproduce`: run a table or figure of a paper, or all of them, and compare its claims."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl.cli import options
from parsifl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Values

SHOWN = 10
"""Most jobs without a result that are named."""
_STOPPED = 130  # the conventional exit code after Ctrl-C


def reproduce(
    name: str | None = typer.Argument(
        None, help="A recipe or a paper; see `parsifl reproduce --list`."
    ),
    scale: str = typer.Option(
        "faithful",
        help="smoke: every code path within minutes, no verdicts; faithful: the paper's protocol "
        "on a CPU (up to hours); full: the paper's own size.",
    ),
    seeds: int = typer.Option(3, min=1, help="Repetitions, for the spread."),
    max_seeds: int | None = typer.Option(
        None,
        help="Add seeds to undecided comparisons, in steps (3, 10, 20), up to this number. Seeds "
        "that choose settings count; replacements of seeds at chance come on top.",
    ),
    out: Path | None = typer.Option(None, help="Where results are kept; else runs/reproduction."),
    data_dir: Path | None = typer.Option(None, help="Directory with datasets, searched first."),
    list_all: bool = typer.Option(False, "--list", help="List the papers and their recipes."),
    record: Path | None = typer.Option(
        None, help="Directory of records (NAME.json) and pages; without NAME: write the pages."
    ),
    collect: bool = typer.Option(False, "--collect", help="Use finished jobs only; run nothing."),
    not_run: str | None = typer.Option(
        None, "--not-run", help="With --record: record why this recipe is not run."
    ),
    jobs: int = options.JOBS,
    reproducible: bool = options.REPRODUCIBLE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Reproduce a table or figure: the claim, the paper's number, ours, and the verdict.

    An interrupted reproduction resumes job by job. Recipes share jobs: work that two of them plan
    runs once.

    Examples:

      parsifl reproduce --list

      parsifl reproduce fedslr --scale smoke

      parsifl reproduce fedmac-table1 --seeds 3 --jobs 2

      parsifl reproduce fedmac-theorem3 --seeds 3 --max-seeds 20 --record docs/reproduction

      parsifl reproduce perfedmask-table7 --record docs/reproduction --not-run "no DomainNet here"
    """
    from parsifl_reproduction import record as records
    from parsifl_reproduction import runner
    from parsifl_reproduction.pages import write_pages

    if name is None and record is not None and not list_all:
        if not record.exists():
            raise ConfigError(
                f"{record} does not exist; record a recipe first: parsifl reproduce NAME --record "
                f"{record}"
            )
        for page in write_pages(record):
            typer.echo(f"Wrote {page}")
        return
    if list_all or name is None:
        _list(as_json)
        return
    context = _context(scale, seeds, max_seeds, data_dir)
    chosen = _chosen(name)
    _check_record(record, context, not_run, chosen)
    place = out or Path("runs") / "reproduction"
    options.check_directory(place)
    if not_run is not None and record is not None:
        for recipe in chosen:
            records.write(record, records.not_run(recipe, context, not_run))
    else:
        if not collect:
            with _resumable(place):
                runner.run_recipes(chosen, context, place, _progress, jobs)
        _print(
            {recipe.name: _outcome(recipe, context, place, record) for recipe in chosen}, as_json
        )
        _name_skipped(chosen, context, place)
    if record is not None:
        write_pages(record)
        typer.echo(f"Wrote the records of {name} and the pages in {record}", err=True)


@contextmanager
def _resumable(place: Path) -> Iterator[None]:
    """Print how to resume interrupted jobs."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; the same command resumes ({place} has the finished jobs)", err=True)
        raise typer.Exit(_STOPPED) from None


def _outcome(recipe: Recipe, context: Context, place: Path, record: Path | None) -> list[Claim]:
    """Return the claims by the finished jobs, and record them if asked."""
    from parsifl_reproduction import record as records
    from parsifl_reproduction import runner

    _name_missing(runner.missing(recipe, context, place), place)
    results, claims = runner.collect(recipe, context, place)
    if record is not None:
        wanted = runner.jobs(recipe, context, place)
        records.write(record, records.record(recipe, context, wanted, results, claims))
    return claims


def _context(scale: str, seeds: int, max_seeds: int | None, data_dir: Path | None) -> Context:
    from parsifl_reproduction.recipe import SCALES, Context

    if max_seeds is not None and max_seeds < seeds:
        raise ConfigError(
            f"--max-seeds must be at least --seeds: got --max-seeds {max_seeds} and --seeds {seeds}"
        )
    if max_seeds is not None and seeds < 2:
        raise ConfigError("--max-seeds needs --seeds 2 or more: one seed leaves nothing undecided")
    if max_seeds is not None and scale == "smoke":
        raise ConfigError("--max-seeds needs verdicts; scale 'smoke' gives none: omit one of them")
    for known in SCALES:
        if scale == known:
            return Context(known, seeds, None if data_dir is None else str(data_dir), max_seeds)
    raise ConfigError(unknown("scale", scale, SCALES))


def _check_record(
    record: Path | None, context: Context, not_run: str | None, chosen: Sequence[Recipe]
) -> None:
    """Raise an error, before hours of work, if the outcome could not be recorded."""
    from parsifl_reproduction import record as records
    from parsifl_reproduction.pages import check_folder

    if not_run is not None and record is None:
        raise ConfigError("--not-run needs the directory that keeps the reason: --record DIR")
    if not_run is not None and not not_run.strip():
        raise ConfigError('--not-run needs a reason, as --not-run "no DomainNet here"')
    if record is None:
        return
    if context.smoke:
        raise ConfigError("scale 'smoke' gives no verdicts to record: use --scale faithful")
    check_folder(record)
    known = records.read_all(record)
    for recipe in chosen:
        found = known.get(recipe.name, {})
        seeds, most = records.asked(found)
        fewer = context.seeds < seeds or (context.max_seeds or context.seeds) < most
        if found.get("claims") and (not_run is not None or fewer):
            options = f"--seeds {seeds}" + (f" --max-seeds {most}" if most > seeds else "")
            raise ConfigError(
                f"{record / recipe.name}.json has claims from {options}, which would be lost; ask "
                "for at least as many seeds, or delete the file to replace it"
            )


def _chosen(name: str) -> Sequence[Recipe]:
    """Return the recipes that a name stands for: one, or those of a paper."""
    from parsifl_reproduction.papers import PAPERS
    from parsifl_reproduction.recipe import recipes

    papers = {paper.key: paper for paper in PAPERS}
    if name in papers:
        return [recipes()[each] for each in papers[name].recipes]
    if name not in recipes():
        raise ConfigError(unknown("recipe", name, [*papers, *recipes()]))
    return [recipes()[name]]


def _progress(job: Job, values: Values, number: int, total: int) -> None:
    from parsifl_reproduction.recipe import SKIPPED

    named = f"{job.label}, seed {job.seed}"
    if SKIPPED in values:
        outcome = f"skipped {named}: {str(values[SKIPPED]).removesuffix('.')}"
    else:
        outcome = f"finished {named}"
    typer.echo(f"[{number}/{total}] {outcome}", err=True)


def _name_skipped(chosen: Sequence[Recipe], context: Context, place: Path) -> None:
    """Print each reason why jobs were skipped once; recipes may share these jobs."""
    from parsifl_reproduction import runner

    reasons: dict[str, str] = {}
    for recipe in chosen:
        reasons |= runner.skipped(recipe, context, place)
    for reason, count in Counter(reasons.values()).items():
        typer.echo(
            f"Skipped jobs: {count} ({reason.removesuffix('.')}). Get the data with `parsifl data "
            "fetch NAME`, or name their directory with --data-dir; then repeat the command.",
            err=True,
        )


def _name_missing(jobs: Sequence[Job], place: Path) -> None:
    if jobs:
        named = "; ".join(f"{job.label}, seed {job.seed}" for job in jobs[:SHOWN])
        more = f"; and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
        typer.echo(
            f"{place} has no result of {len(jobs)} jobs, which count as not run: {named}{more}. "
            "Run the command without --collect to finish them.",
            err=True,
        )


def _list(as_json: bool) -> None:
    from parsifl_reproduction.papers import PAPERS
    from parsifl_reproduction.recipe import recipes

    known = {key: recipe.title for key, recipe in recipes().items()}
    if as_json:
        typer.echo(json.dumps({**{paper.key: paper.title for paper in PAPERS}, **known}))
        return
    groups = {f"{paper.key}: {paper.title}": paper.recipes for paper in PAPERS}
    listed = {key for own in groups.values() for key in own}
    groups["Recipes of no paper:"] = [key for key in known if key not in listed]
    for title, own in groups.items():
        typer.echo(title)
        for key in own:
            typer.echo(f"  {key:32s} {known[key]}")


def _print(outcome: dict[str, list[Claim]], as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    rows: dict[str, list[dict[str, Any]]] = {
        recipe: [asdict(claim) for claim in claims] for recipe, claims in outcome.items()
    }
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for recipe, claims in rows.items():
        table = Table("claim", "paper", "ours", "verdict", "note", title=recipe)
        for row in claims:
            keys = ("statement", "paper", "ours", "verdict", "note")
            table.add_row(*(str(row[key]) for key in keys))
        Console().print(table)
