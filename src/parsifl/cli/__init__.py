"""The command line."""

from __future__ import annotations


def main() -> None:
    """Run the `parsifl` command."""
    from parsifl.cli.app import app

    app()
