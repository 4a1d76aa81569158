"""Errors for people: a message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from parsifl.errors import ParsiflError

EXIT_MISTAKE = 2


class FriendlyGroup(TyperGroup):
    """Tells errors that a user can mend (files that cannot be read included); exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ParsiflError, OSError, UnicodeDecodeError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_MISTAKE) from None
