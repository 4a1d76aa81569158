"""`parsifl run` and `parsifl demo`: train and evaluate."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl.cli import options
from parsifl.cli.progress import follow
from parsifl.core import plugins
from parsifl.core.errors import ConfigError, DroppedClientWarning, unknown
from parsifl.engine import profiling

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment
    from parsifl.engine.record import RoundRecord
    from parsifl.engine.run import Run
    from parsifl.engine.run_dir import RunData

LOCAL = "local"
_STOPPED = 130  # the conventional exit code after Ctrl-C
DEMO: dict[str, dict[str, float]] = {
    "local": {"lr": 0.1},
    "fedavg": {"lr": 0.1},
    "scaffold": {"lr": 0.1},
    "ditto": {"lr": 0.1},
    "fedmac": {"lr": 0.1, "gamma": 1e-3, "threshold": 0.01},
    "fedslr": {"lr": 0.1, "lam": 2e-3},
}

DEMO_NOTE = (
    "A client with 22 rows cannot learn ten digits alone, so every algorithm that shares beats "
    "`local`; FedSLR and FedMac add personal models and send fewer bytes than FedAvg.\n"
    "This case was chosen to show that. With 20 clients that hold two labels each, `local` is "
    "among the best: parsifl run local --clients 20 --partition pathological --set lr=0.1"
)


@options.with_run_options
def run(  # `context` holds the values of the options
    context: typer.Context,
    algorithm: str = options.ALGORITHM,
    engine: str | None = options.ENGINE,
    settings: list[str] = options.SET,
    config: Path | None = options.CONFIG,
    out: Path | None = typer.Option(None, help="The run directory. Default: none is written."),
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
    reproducible: bool = options.REPRODUCIBLE,
    profile: bool = typer.Option(False, help="Print the time spent by phase."),
    as_json: bool = options.JSON,
) -> None:
    """Train one algorithm and evaluate its models.

    Examples:

      parsifl run fedavg --data digits --clients 20 --rounds 50 --set lr=0.1 --out runs/fedavg

      parsifl run ditto --data mnist --partition dirichlet:alpha=0.1 --participation 0.5

      parsifl run perfedmask --profiles budget=0.25+1 --model mlp:hidden=64+32

      parsifl run fedavg --config experiment.toml --resume --out runs/fedavg

      parsifl run ditto --clients 3 --rounds 2 --engine flower --out runs/deployed
    """
    if resume and out is None:
        raise ConfigError("--resume needs the run directory: --out DIR")
    chosen, where = _chosen(context.params)
    with _resumable(out), _run_directory(out, needed=where != LOCAL) as folder:
        # a deployment returns an object with the same records, `summary` and `recorded`
        start = execute if where == LOCAL else plugins.load(plugins.ENGINES, where)
        finished = start(chosen, folder, resume=resume, data_dir=data_dir, quiet=as_json)
        if as_json:
            row = {"algorithm": chosen.algorithm, **finished.summary()}
            if profile:
                row["profile"] = profiling.profile(finished.records)
            typer.echo(json.dumps(row))
        else:
            show([finished.recorded()])
            _show_distance(finished.records)
            if profile:
                show_profile(finished.records)


def _chosen(params: Mapping[str, Any]) -> tuple[Experiment, str]:
    """Return the experiment, and the engine that runs it."""
    from parsifl.engine.experiment import Experiment

    values = options.merged(params)
    engine = str(values.pop("engine", LOCAL))
    engines = (LOCAL, *plugins.names(plugins.ENGINES))
    if engine not in engines:
        raise ConfigError(unknown("engine", engine, engines))
    return Experiment.read(values), engine


@contextmanager
def _resumable(out: Path | None) -> Iterator[None]:
    """Print how to resume an interrupted run."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None:
            text = "stopped; without --out DIR nothing is saved, so the run cannot be resumed"
        elif (out / "checkpoint" / "LATEST").exists():
            text = f"stopped; resume with the same command and --resume ({out} has the checkpoint)"
        else:
            text = (
                "stopped before the first checkpoint; the same command with --resume starts from "
                "the beginning"
            )
        typer.echo(f"\n{text}", err=True)
        raise typer.Exit(_STOPPED) from None


@contextmanager
def _run_directory(out: Path | None, *, needed: bool) -> Iterator[Path | None]:
    """Yield the run directory, or a temporary one if a deployment needs one."""
    if out is not None or not needed:
        yield out
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "run"


def demo(
    out: Path = typer.Option(Path("runs/demo"), help="Directory of the runs and the report."),
    rounds: int = typer.Option(60, help="Number of rounds."),
    reproducible: bool = options.REPRODUCIBLE,
) -> None:
    """Compare six algorithms on the digits dataset that ships with scikit-learn.

    Sixty clients hold about 22 training rows each, with unequal shares of the ten digits. Prints a
    table and writes a report to open in a browser.

    Example:

      parsifl demo --out runs/demo
    """
    from parsifl.engine.experiment import Experiment

    folders = [out / name for name in DEMO]
    runs: list[RunData] = []
    for (name, settings), folder in zip(DEMO.items(), folders, strict=True):
        chosen = Experiment(
            name,
            settings,
            data="digits",
            clients=60,
            partition="dirichlet:alpha=0.5",
            rounds=rounds,
            participation=0.5,
        )
        runs.append(execute(chosen, folder, resume=True).recorded())
    show(runs)
    report = plugins.load(plugins.REPORTS, "page")(folders, out / "report.html")
    typer.echo(f"\n{DEMO_NOTE}\nThe report is in {report}: open it in a browser.")


def execute(
    chosen: Experiment,
    out: Path | None,
    *,
    resume: bool = False,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> Run:
    """Run an experiment with its progress on standard error."""
    with follow(chosen.algorithm, chosen.rounds, quiet=quiet) as show, warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedClientWarning)  # `show` names these clients
        callbacks = [lambda event: show(event.record)]
        return chosen.run(out, resume=resume, data_dir=data_dir, callbacks=callbacks)


def show(runs: Sequence[RunData]) -> None:
    """Print the headline of finished runs."""
    plugins.load(plugins.REPORTS, "table")(runs)


def _show_distance(records: Sequence[RoundRecord]) -> None:
    """Print how far the global model is from the coefficients of a simulated dataset."""
    distance = records[-1].metrics.get("distance") if records else None
    if distance is not None:
        typer.echo(f"Relative distance to the true coefficients, last round: {distance:.3g}")


def show_profile(records: Sequence[RoundRecord]) -> None:
    """Print the time of a run by phase."""
    from rich.console import Console
    from rich.table import Table

    phases = profiling.profile(records)
    once = phases.pop(profiling.ONCE, 0.0)
    total = sum(phases.values())
    table = Table(title=f"{len(records)} rounds, {total:.2f} s")
    for column in ("phase", "seconds", "ms per round", "share"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, seconds in phases.items():
        share = seconds / total if total else 0.0
        milliseconds = 1e3 * seconds / len(records)
        table.add_row(phase, f"{seconds:.3f}", f"{milliseconds:.2f}", f"{share:.1%}")
    console = Console()
    console.print(table)
    if once:
        console.print(f"Counting operations, once: {once:.3f} s.", highlight=False)
