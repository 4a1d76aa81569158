"""Commands that other packages add through the entry point group "parsifl.commands"."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from parsifl.core.errors import ConfigError

ENTRY_POINT_GROUP = "parsifl.commands"


def mount(app: typer.Typer) -> None:
    """Add every installed command; `reproduce` says how to install it where it is missing."""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    for name, entry in sorted(found.items()):
        app.command(name)(entry.load())
    if "reproduce" not in found:
        app.command("reproduce", hidden=True)(_missing)


def _missing() -> None:
    """Reproduce the papers (not installed)."""
    raise ConfigError(
        "`parsifl reproduce` needs the package parsifl-reproduction, which is in the repository: "
        "run `make setup` there, or `pip install ./reproduction`"
    )
