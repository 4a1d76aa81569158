"""Errors for people: a message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

from typing import Any

import typer
from typer import core

from parsifl.errors import ParsiflError

EXIT_MISTAKE = 2

# help is printed plainly here, but typer escapes its brackets, "\[default: 3]", for rich
core.HAS_RICH = False


class FriendlyGroup(core.TyperGroup):
    """Tells errors that a user can mend (files that cannot be read included); exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ParsiflError, OSError, UnicodeDecodeError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_MISTAKE) from None
