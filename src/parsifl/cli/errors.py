"""Print errors and warnings as messages, without tracebacks or source lines."""

from __future__ import annotations

import warnings
from typing import Any

import click
import typer
from typer import core, main, models

from parsifl.core import renamed
from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.core.text import visible

EXIT_MISTAKE = 2

# help is printed plainly here, but typer escapes its brackets, "\[default: 3]", for rich
core.HAS_RICH = False


class _Path(models.TyperPath):
    """A non-empty path: an empty one would silently mean the current directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path."""
        if value == "":
            raise ConfigError(f"{param.opts[0]}: the path is empty; write . for this directory")
        return super().convert(value, param, ctx)


main.TyperPath = _Path  # type: ignore[attr-defined]


class FriendlyGroup(core.TyperGroup):
    """Prints errors that a user can fix, including unreadable files, and exits with code 2."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command. Click suggests similar names; typer would suggest them once more."""
        return super(core.TyperGroup, self).resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            new = renamed.SETTINGS.get(name, "").replace("_", "-")
            if not new or new not in _names(error.ctx):
                raise
            typer.echo(f"error: {error.option_name} was renamed to --{new}", err=True)
            raise typer.Exit(EXIT_MISTAKE) from None
        except BrokenPipeError:  # the reader, such as `head`, has enough; click ends quietly
            raise
        except (ParsiflError, OSError, UnicodeDecodeError) as error:
            typer.echo(visible(f"error: {error}"), err=True)
            raise typer.Exit(EXIT_MISTAKE) from None


def _names(context: click.Context | None) -> list[str]:
    """Return the options of a command, without dashes in front."""
    options = [] if context is None else context.command.params
    return [text.lstrip("-") for option in options for text in option.opts]


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(visible(f"warning: {message}"), err=True)
