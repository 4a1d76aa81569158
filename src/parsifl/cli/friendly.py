"""Errors for people: a message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from parsifl.errors import ParsiflError

EXIT_MISTAKE = 2


class FriendlyGroup(TyperGroup):
    """A group of commands in which a `ParsiflError` is told and ends the program with code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ParsiflError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_MISTAKE) from None
