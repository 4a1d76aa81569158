"""`parsifl sweep`: tune an algorithm over a grid."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from parsifl.cli import options
from parsifl.cli.run import execute
from parsifl.core.config import grid as read_grid
from parsifl.core.config import to_json
from parsifl.core.errors import ConfigError

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment
    from parsifl.engine.study import GridResult

HELD_OUT = 0.1
"""The default fraction of validation rows, which select the best combination."""


@options.with_run_options
def sweep(  # `context` holds the values of the options
    context: typer.Context,
    algorithm: str = options.ALGORITHM,
    grid: list[str] = typer.Option(
        ...,
        "--grid",
        help="Values of a setting of the algorithm or the run, name=a,b,c; repeatable.",
    ),
    seeds: int = typer.Option(1, help="Seeds per combination."),
    target: Literal["personal", "global"] = typer.Option(
        "personal", "--target", help="Which model's score is optimized."
    ),
    settings: list[str] = options.SET,
    config: Path | None = options.CONFIG,
    out: Path = typer.Option(Path("runs/sweep"), help="The directory of all runs."),
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
    jobs: int = options.JOBS,
    reproducible: bool = options.REPRODUCIBLE,
    as_json: bool = options.JSON,
) -> None:
    """Run every combination of a grid and select the best.

    The best combination is selected on validation rows, by default a tenth of each client's rows.
    --validation 0 selects on test rows; the output then warns that the score is optimistic.

    Examples:

      parsifl sweep fedavg --grid lr=0.01,0.05,0.1 --seeds 3 --data digits --rounds 50

      parsifl sweep ditto --grid lam=0.01,0.1,1 --validation 0.1 --select best-validation --resume
    """
    from parsifl.engine import study
    from parsifl.engine.run_dir import open_run

    base = options.experiment(context.params)
    if not base.evaluate_every:
        raise ConfigError("a sweep compares scores: --evaluate-every must be at least 1")
    if context.params["validation"] is None and not base.validation:
        base = replace(base, validation=HELD_OUT)
    values = read_grid(grid)
    options.check_directory(out)
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} is not empty; resume with --resume or choose another --out")
    # several processes would overwrite each other's progress
    run = partial(execute, resume=True, data_dir=data_dir, quiet=as_json or jobs > 1)
    outcomes = study.sweep(base, values, seeds, run, out, jobs)
    first = out / outcomes[0].point.label / f"seed-{base.seed}"
    winner = study.best(outcomes, target, open_run(first).maximize)
    split = study.chosen_by(outcomes, target)
    if split == "test":
        typer.echo(_OPTIMISTIC, err=True)
    if as_json:
        _print_json(base, outcomes, winner, split)
    else:
        _print(outcomes, winner, target, split)


_OPTIMISTIC = (
    "note: no validation rows are held out, so the best is selected on the test rows that it is "
    "evaluated on. Its score is optimistic: hold out rows with --validation 0.1"
)


def _print_json(
    base: Experiment, outcomes: list[GridResult], winner: GridResult, split: str
) -> None:
    for outcome in outcomes:
        point = outcome.point.settings
        varied = base.vary(point)
        # numbers, not text
        values = {**to_json(varied.build_algorithm()), **to_json(varied)}
        row = {
            "settings": {name: values[name] for name in point},
            "best": outcome is winner,
            "chosen_by": split,
            "validation": list(outcome.validation),
            "runs": list(outcome.summaries),
        }
        typer.echo(json.dumps(row))


def _print(outcomes: list[GridResult], winner: GridResult, model: str, split: str) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = f"best: {model} model on {split} rows; the other columns are test scores"
    table = Table("settings", f"{model}, validation", "global", "personal", "seeds", "")
    table.caption, table.caption_justify = caption, "left"
    for outcome in outcomes:
        scores = (outcome.mean(model, "validation"), *map(outcome.mean, ("global", "personal")))
        cells = ["-" if score is None else f"{score:.4f}" for score in scores]
        mark = "best" if outcome is winner else ""
        table.add_row(outcome.point.label, *cells, str(len(outcome.summaries)), mark)
    Console().print(table)
