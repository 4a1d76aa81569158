"""`parsifl list` and `parsifl show`: what there is."""

from __future__ import annotations

import inspect
import json
import re
import typing
from typing import Any, Literal

import typer

Kind = Literal["algorithms", "datasets", "models", "partitions"]
_KIND = typer.Argument(help="algorithms, datasets, models or partitions.")
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")


def list_(kind: Kind = _KIND, as_json: bool = _JSON) -> None:
    """List algorithms, datasets, models or partitions.

    Examples:

      parsifl list algorithms

      parsifl list datasets --json
    """
    from rich.console import Console
    from rich.table import Table

    rows = _catalog(kind)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(box=None, show_header=False)
    for name, text in rows.items():
        table.add_row(f"[bold]{name}[/bold]", text)
    Console().print(table)


def _catalog(kind: Kind) -> dict[str, str]:
    if kind == "algorithms":
        from parsifl.core.registry import algorithms

        return {name: _first_line(method) for name, method in algorithms().items()}
    if kind == "models":
        from parsifl.linear.glm import GLM
        from parsifl.nn import models

        return {"glm": _first_line(GLM)} | {name: models.summary(name) for name in models.names()}
    from parsifl import data

    if kind == "partitions":
        return {
            name: _first(data.describe_partition(name)["notes"]) for name in data.partition_names()
        }
    return {name: data.describe(name)["title"] for name in data.names()}


def show(
    algorithm: str = typer.Argument(help="An algorithm; see `parsifl list algorithms`."),
    as_json: bool = _JSON,
) -> None:
    """Show an algorithm: its equations, fields, messages and citation.

    Example:

      parsifl show scaffold
    """
    from rich.console import Console
    from rich.table import Table

    found = describe(algorithm)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(f"[bold]{found['class']}[/bold]  ({found['cites']})", highlight=False)
    console.print(found["text"], markup=False, highlight=False)
    table = Table(title="fields (set with --set name=value)", title_justify="left")
    for column in ("field", "type", "default"):
        table.add_column(column)
    for field in found["fields"]:
        table.add_row(field["name"], field["type"], repr(field["default"]))
    console.print(table)
    console.print(f"sent down: {found['down']}", markup=False, highlight=False)
    console.print(f"sent up: {found['up']}", markup=False, highlight=False)
    console.print(f"kept on the client: {found['client']}", markup=False, highlight=False)
    for capability, offered in found["requires"].items():
        text = f"needs a problem that is {capability}" + (offered and f": {offered}")
        console.print(text, markup=False, highlight=False)


def describe(name: str) -> dict[str, Any]:
    """Return everything that `show` prints, as plain values."""
    import dataclasses

    from parsifl.core import config, registry
    from parsifl.core.problem import OFFERED_BY

    method = registry.find(name)()
    kind, types = type(method), method.tree_types()
    values = config.to_json(method)
    fields = [
        {"name": f.name, "type": _type_name(f.type), "default": values[f.name]}
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]  # every method is a dataclass
    ]
    return {
        "name": kind.__name__.lower(),
        "class": kind.__name__,
        "cites": kind.cites,
        "text": inspect.getdoc(kind) or "",
        "fields": fields,
        "down": _type_name(types.downlink),
        "up": _type_name(types.uplink),
        "client": _type_name(types.client),
        "requires": {c.__name__: OFFERED_BY.get(c, "") for c in kind.requires},
    }


def _type_name(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "nothing"
    if isinstance(kind, str):
        return kind
    whole = str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
    return re.sub(r"\b(?:\w+\.)+(\w)", r"\1", whole)


def _first_line(thing: Any) -> str:
    return _first(inspect.getdoc(thing) or "")


def _first(text: str) -> str:
    return text.partition("\n")[0]
