"""`parsifl sweep`: tune an algorithm over a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from parsifl.cli import options
from parsifl.cli.run import execute
from parsifl.errors import ConfigError

if TYPE_CHECKING:
    from parsifl.engine.run import Run
    from parsifl.experiment import Experiment
    from parsifl.sweeps import Outcome


def sweep(  # typer reads the options from the signature; `context` holds their values
    context: typer.Context,
    algorithm: str = options.ALGORITHM,
    grid: list[str] = typer.Option(..., "--grid", help="field=a,b,c; repeatable."),
    seeds: int = typer.Option(1, help="Repetitions of every combination."),
    model_judged: str = typer.Option(
        "personal", "--judge", help="Which model is to be best: personal or global."
    ),
    data: str | None = options.DATA,
    clients: int | None = options.CLIENTS,
    partition: str | None = options.PARTITION,
    model: str | None = options.MODEL,
    devices: str | None = options.DEVICES,
    rounds: int | None = options.ROUNDS,
    seed: int | None = options.SEED,
    participation: float | None = options.PARTICIPATION,
    evaluate_every: int | None = options.EVERY,
    validation: float | None = options.VALIDATION,
    select: str | None = options.SELECT,
    settings: list[str] = options.SET,
    config: Path | None = options.CONFIG,
    out: Path = typer.Option(Path("runs/sweep"), help="A folder for all runs."),
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
    as_json: bool = options.JSON,
) -> None:
    """Run every combination of a grid and name the best.

    Examples:

      parsifl sweep fedavg --grid lr=0.01,0.05,0.1 --seeds 3 --data digits --rounds 50

      parsifl sweep ditto --grid lam=0.01,0.1,1 --validation 0.1 --select best-validation --resume
    """
    from parsifl import sweeps

    base = options.experiment(context.params)
    values = {
        name: list(dict.fromkeys(text.split(",")))
        for name, text in options.assignments(grid).items()
    }
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} is not empty; go on with --resume or choose another --out")
    maximize = True

    def run(experiment: Experiment, folder: Path) -> Run:
        nonlocal maximize
        finished = execute(experiment, folder, resume=True, data_dir=data_dir, quiet=as_json)
        maximize = finished.problem.maximize
        return finished

    outcomes = sweeps.sweep(base, values, seeds, run, out)
    winner = sweeps.best(outcomes, model_judged, maximize)
    _print(outcomes, winner, as_json=as_json)


def _print(outcomes: list[Outcome], winner: Outcome, *, as_json: bool) -> None:
    if as_json:
        for outcome in outcomes:
            row = {
                "settings": outcome.point.settings,
                "best": outcome is winner,
                "runs": list(outcome.summaries),
            }
            typer.echo(json.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("settings", "global", "personal", "seeds", "")
    for outcome in outcomes:
        scores = (outcome.mean("global"), outcome.mean("personal"))
        cells = ["-" if score is None else f"{score:.4f}" for score in scores]
        mark = "best" if outcome is winner else ""
        table.add_row(outcome.point.label, *cells, str(len(outcome.summaries)), mark)
    Console().print(table)
