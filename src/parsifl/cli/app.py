"""The `parsifl` command with its groups and subcommands."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint

import typer

import parsifl
from parsifl.cli import (
    data,
    doctor,
    list_show,
    masks,
    run,
    sweep,
)
from parsifl.cli.errors import FriendlyGroup
from parsifl.core import plugins
from parsifl.core.errors import ConfigError

_EXAMPLE = re.compile(r"(?<=\n\n)  (?=\S)")
_ANY_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}


def mount_plugins(app: typer.Typer) -> None:
    """Add every installed command; a missing `reproduce` explains how to install it."""
    installed = plugins.entries(plugins.COMMANDS)
    for entry in installed:
        _mount(app, entry.name, entry)
    if "reproduce" not in [entry.name for entry in installed]:
        app.command("reproduce", hidden=True, context_settings=_ANY_WORDS)(_missing)


def _mount(app: typer.Typer, name: str, entry: EntryPoint) -> None:
    """Add a command or a group; one that cannot be imported fails when it runs."""
    try:
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    except Exception as error:  # another package may fail in any way; the others remain available
        reason = f"{type(error).__name__}: {error}"

        def broken() -> None:
            """Raise the error of a command that cannot be imported."""
            raise ConfigError(
                f"the command {entry.name!r} of {entry.value} cannot be imported ({reason}); "
                "repair or uninstall the package that has it"
            )

        app.command(name, context_settings=_ANY_WORDS)(broken)


def keep_examples(app: typer.Typer) -> None:
    """Print the examples of help texts on one line each, so that they can be copied."""
    for command in app.registered_commands:
        text = inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "")
        command.help = _EXAMPLE.sub("\b\n  ", text)  # click does not wrap text after \b
    for group in app.registered_groups:
        if group.typer_instance is not None:
            keep_examples(group.typer_instance)


def _missing() -> None:
    """Reproduce the papers (not installed)."""
    raise ConfigError(
        "`parsifl reproduce` needs the package parsifl-reproduction, which is in the repository: "
        "run `make setup` there, or `pip install ./reproduction`"
    )


app = typer.Typer(
    cls=FriendlyGroup,
    help="Parsimonious federated learning: sparse, low-rank and masked models across clients.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)

_START = """Parsifl: parsimonious federated learning.

  parsifl demo                     compare six algorithms; needs no download
  parsifl list algorithms          also: datasets, models, partitions
  parsifl show fedavg              equations, settings and messages of an algorithm
  parsifl run fedavg --data digits --rounds 50 --out runs/first
  parsifl report runs/* -o report.html
  parsifl reproduce --list         recipes for the tables and figures of five papers
  parsifl doctor                   check this installation

  parsifl COMMAND --help           options and examples of a command
  parsifl --install-completion     enable shell completion"""


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """Print the start page."""
    if version:
        typer.echo(parsifl.__version__)
    elif ctx.invoked_subcommand is None:
        typer.echo(_START)


app.command()(run.run)
app.command()(run.demo)
app.command()(sweep.sweep)
app.command("list")(list_show.list_)
app.command()(list_show.show)
app.command()(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(masks.app, name="masks")
mount_plugins(app)
keep_examples(app)
