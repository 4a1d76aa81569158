"""Options that several commands share, and how they become an experiment."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl import startup
from parsifl.core import config
from parsifl.core.errors import ConfigError

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment

ALGORITHM = typer.Argument(help="An algorithm, e.g. fedavg; see `parsifl list algorithms`.")
DATA = typer.Option(None, help="A dataset, e.g. digits or mnist:normalize=unit.")
CLIENTS = typer.Option(None, help="Number of clients.")
PARTITION = typer.Option(None, help="How rows are divided among clients, e.g. dirichlet:alpha=0.1.")
MODEL = typer.Option(
    None, help="A model, e.g. mlp:hidden=100, vgg or glm. Default: chosen by the data."
)
DEVICES = typer.Option(
    None, help="Device profiles, assigned to groups of clients, e.g. budget=0.125+1,epochs=2+4."
)
ROUNDS = typer.Option(None, help="Number of rounds.")
SEED = typer.Option(None, help="Random seed; it determines all random numbers.")
PARTICIPATION = typer.Option(None, help="Fraction of clients per round.")
ENGINE = typer.Option(
    None, help="Where clients live: local (this process), flower or flower-sim (this machine)."
)
EXECUTOR = typer.Option(None, help="How clients run: auto, loop, threads, vmap or fused.")
EVERY = typer.Option(None, "--evaluate-every", help="Rounds between evaluations; 0: never.")
PRECISION = typer.Option(
    None, help="Precision of values in messages: exact, bfloat16, float16 or int8."
)
VALIDATION = typer.Option(None, help="Fraction of each client's rows held out for validation.")
TEST = typer.Option(
    None, help="Fraction of rows held out for testing, or a rule: all, shares, groups."
)
FINE_TUNE = typer.Option(
    None,
    "--fine-tune-steps",
    help="Fine-tune personal models for this many SGD steps before evaluation.",
)
TRAIN = typer.Option(
    None, "--train-scores", help="Also evaluate on training rows; metrics.jsonl has the scores."
)
SELECT = typer.Option(None, help="Which round to report: last, best-validation, best-test.")
SET = typer.Option(
    [], "--set", help="A setting of the algorithm, e.g. lr=0.1, batch_size=none, milestones=10+20."
)
CONFIG = typer.Option(
    None, "--config", help="A TOML file with these settings; command-line options take precedence."
)
DATA_DIR = typer.Option(
    None,
    "--data-dir",
    help="Directory to search first; falls back to $PARSIFL_DATA, then the cache.",
)
JOBS: Any = typer.Option(1, "--jobs", min=1, help="Runs at a time, each in its own process.")
RESUME = typer.Option(False, "--resume", help="Resume the run in the output directory.")


def _make_reproducible(value: bool) -> bool:
    if value:
        startup.make_reproducible()
    return value


REPRODUCIBLE = typer.Option(
    False,
    "--reproducible",
    callback=_make_reproducible,
    help="Bit-identical results on every x86-64 processor with FMA; slower. "
    "Same as PARSIFL_REPRODUCIBLE=1.",
)
JSON = typer.Option(False, "--json", help="Print JSON.")


_EVALUATION = ("fine_tune_steps", "select", "train")
_PLAIN = (
    "algorithm", "data", "clients", "partition", "model", "devices", "rounds", "seed",
    "participation", "engine", "executor", "evaluate_every", "precision", "validation", "test",
)  # fmt: skip


def experiment(params: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a command."""
    from parsifl.engine.experiment import Experiment

    return Experiment.read(merged(params))


def merged(params: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the TOML file, the options and the --set fields of a command."""
    given = {name: value for name, value in params.items() if value is not None}
    values = read_toml(Path(given["config"])) if "config" in given else {}
    for name in ("settings", "evaluation", "network"):
        if not isinstance(values.get(name, {}), Mapping):
            raise ConfigError(f"{name} must be a table of the configuration file, as [{name}]")
    values.update({name: given[name] for name in _PLAIN if name in given})
    evaluation = {name: given[name] for name in _EVALUATION if name in given}
    if evaluation:
        values["evaluation"] = {**values.get("evaluation", {}), **evaluation}
    values["settings"] = {**values.get("settings", {}), **config.assignments(given["settings"])}
    return values


def check_directory(out: Path) -> None:
    """Reject an output directory that is a file."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; choose a directory")


def finite(value: float | None) -> float | None:
    """Reject NaN, which passes every range check, and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file not found: {file}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
