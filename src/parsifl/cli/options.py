"""Options that several commands share, and how they become an experiment."""

from __future__ import annotations

import functools
import inspect
import math
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union

import typer

from parsifl import startup
from parsifl.core import config
from parsifl.core.errors import ConfigError
from parsifl.engine.settings import Declaration, ExperimentSettings, declarations

if TYPE_CHECKING:
    from parsifl.engine.experiment import Experiment

_DECLARED = {each.name: each for each in declarations(ExperimentSettings)}
ALGORITHM = typer.Argument(help=_DECLARED["algorithm"].text)
ENGINE = typer.Option(
    None, help="Where clients live: local (this process), flower or flower-sim (this machine)."
)
SET = typer.Option([], "--set", help=_DECLARED["settings"].text)
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


_TEXT = (str, int, float, bool)


def _options() -> dict[str, tuple[Declaration, str]]:
    """Return the declarations that have an option, and the table that each of them belongs to."""
    nested = [(each, table.name) for table in _DECLARED.values() for each in table.nested]
    every = [*((each, "") for each in _DECLARED.values()), *nested]
    return {each.name: (each, table) for each, table in every if each.option}


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for every setting of a run to a command; its context has their values.

    A setting that the command declares itself gets no second option. The others precede `--set`.
    """
    hints = typing.get_type_hints(command)
    declared = inspect.signature(command).parameters
    parameters: list[inspect.Parameter] = []
    for parameter in declared.values():
        if parameter.name == "settings":
            parameters += [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=typer.Option(None, setting.option, help=_help(setting)),
                    annotation=_plain_type(setting.hint) | None,
                )
                for name, (setting, _) in _options().items()
                if name not in declared
            ]
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    hints |= {each.name: each.annotation for each in parameters if each.name not in declared}

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name in declared})

    vars(with_options)["__signature__"] = inspect.Signature(parameters)
    with_options.__annotations__ = hints
    return with_options


def _plain_type(hint: Any) -> Any:
    """Return the type of the text of an option: text if several types are possible."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _plain_type(arguments[0])
    if origin in (Union, UnionType):
        kinds = {_plain_type(each) for each in arguments if each is not type(None)}
        return kinds.pop() if len(kinds) == 1 else str
    return hint if hint in _TEXT else str


def _help(declared: Declaration) -> str:
    values = config.choices(declared.hint)
    more = f" One of {', '.join(values)}." if values else ""
    default = declared.default
    return f"{declared.text}{more}" + (
        "" if default in (None, "", False) else f" Default: {default}."
    )


def experiment(params: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a command."""
    from parsifl.engine.experiment import Experiment

    return Experiment.read(merged(params))


def merged(params: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Merge defaults, the TOML file, the options and the --set fields of a command."""
    options = {name: value for name, value in params.items() if value is not None}
    values = {
        **(defaults or {}),
        **(read_toml(Path(options["config"])) if "config" in options else {}),
    }
    for name in ("settings", "evaluation", "network"):
        if not isinstance(values.get(name, {}), Mapping):
            raise ConfigError(f"{name} must be a table of the configuration file, as [{name}]")
    values |= {name: options[name] for name in ("algorithm", "engine") if name in options}
    for name, (_, table) in _options().items():
        if name in options and table:
            values[table] = {**values.get(table, {}), name: options[name]}
        elif name in options:
            values[name] = options[name]
    values["settings"] = {**values.get("settings", {}), **config.assignments(options["settings"])}
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
