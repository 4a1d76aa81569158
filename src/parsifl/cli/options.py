"""Options that several commands share, and how they become an experiment."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parsifl import startup
from parsifl.core.errors import ConfigError

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment

ALGORITHM = typer.Argument(help="An algorithm, e.g. fedavg; see `parsifl list algorithms`.")
DATA = typer.Option(None, help="A data set, e.g. digits or mnist:normalize=unit.")
CLIENTS = typer.Option(None, help="How many clients.")
PARTITION = typer.Option(None, help="How the data are divided, e.g. dirichlet:alpha=0.1.")
MODEL = typer.Option(None, help="A model, e.g. mlp:hidden=100, vgg, glm; else one that fits.")
DEVICES = typer.Option(
    None, help="Unequal devices, dealt to groups of clients, e.g. budget=0.125+1,epochs=2+4."
)
ROUNDS = typer.Option(None, help="How many rounds.")
SEED = typer.Option(None, help="Everything random follows from it.")
PARTICIPATION = typer.Option(None, help="The fraction of clients in a round.")
ENGINE = typer.Option(
    None, help="Where clients live: local (this process), flower or flower-sim (this machine)."
)
EXECUTOR = typer.Option(None, help="How clients run: auto, loop, threads, vmap or fused.")
EVERY = typer.Option(None, "--evaluate-every", help="Judge every so many rounds; 0: never.")
PRECISION = typer.Option(None, help="How values travel: exact, bfloat16, float16 or int8.")
VALIDATION = typer.Option(None, help="The fraction of each client's rows held out for tuning.")
TEST = typer.Option(None, help="The fraction held out for testing, or a rule: all, shares, groups.")
FINE_TUNE = typer.Option(
    None, "--fine-tune-steps", help="SGD steps of every personal model before it is judged."
)
SELECT = typer.Option(None, help="The round of the headline: last, best-validation, best-test.")
SET = typer.Option(
    [], "--set", help="A field of the algorithm, e.g. lr=0.1, batch=none, milestones=10+20."
)
CONFIG = typer.Option(None, "--config", help="A TOML file with these settings; options win.")
DATA_DIR = typer.Option(
    None, "--data-dir", help="A folder that is looked at first (else $PARSIFL_DATA, the cache)."
)
RESUME = typer.Option(False, "--resume", help="Go on with what is in the folder.")


def _make_reproducible(value: bool) -> bool:
    if value:
        startup.make_reproducible()
    return value


REPRODUCIBLE = typer.Option(
    False,
    "--reproducible",
    callback=_make_reproducible,
    help="The same bits on every x86-64 processor, more slowly (or set PARSIFL_REPRODUCIBLE=1).",
)
JSON = typer.Option(False, "--json", help="Print JSON for machines.")


_EVALUATION = ("fine_tune_steps", "select")
_PLAIN = (
    "algorithm", "data", "clients", "partition", "model", "devices", "rounds", "seed",
    "participation", "engine", "executor", "evaluate_every", "precision", "validation", "test",
)  # fmt: skip


def experiment(params: Mapping[str, Any]) -> Experiment:
    """Return the experiment that a command asks for."""
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
    values["settings"] = {**values.get("settings", {}), **assignments(given["settings"])}
    return values


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Read `field=value` texts.

    >>> assignments(["lr=0.1"])
    {'lr': '0.1'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"cannot read '{text}'; write field=value, e.g. lr=0.1")
        found[name.strip()] = value.strip()
    return found


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
