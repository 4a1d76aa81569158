"""`parsifl list` and `parsifl show`: list and describe algorithms, datasets and models."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import typer

from parsifl.cli import plain_text
from parsifl.core.config import LARGEST
from parsifl.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from parsifl.core.registry import Registry

Kind = Literal[
    "algorithms",
    "datasets",
    "models",
    "partitions",
    "uploads",
    "aggregations",
    "server-optimizers",
]
Changes = Literal["uploads", "aggregations", "server-optimizers"]
_KIND = typer.Argument(help="What to list.")
_JSON = typer.Option(False, "--json", help="Print JSON.")
_WIDTH = 100
_OPTIONS = ("--upload", "--aggregation", "--server-optimizer")
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def list_(kind: Kind = _KIND, as_json: bool = _JSON) -> None:
    """List algorithms, datasets, models, partitions, or changes to an algorithm.

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

        return {name: _first_line(kind) for name, kind in algorithms().items()}
    if kind == "models":
        from parsifl.linear.glm import GLM
        from parsifl.nn import models

        return {"glm": _first_line(GLM)} | {name: models.summary(name) for name in models.names()}
    if kind in typing.get_args(Changes):
        return {name: _first_line(part) for name, part in _changes()[kind].items()}
    from parsifl import data

    if kind == "partitions":
        return {
            name: _first(data.describe_partition(name)["notes"]) for name in data.partition_names()
        }
    return {name: data.describe(name)["title"] for name in data.names()}


def _changes() -> dict[str, dict[str, Any]]:
    """Return the classes of upload transforms, aggregations and server optimizers by name."""
    from parsifl.algorithms.composed import AGGREGATIONS
    from parsifl.solvers.server_optimizers import SERVER_OPTIMIZERS
    from parsifl.solvers.upload_transforms import UPLOADS

    registries: dict[str, Registry[Any]] = {
        "uploads": UPLOADS,
        "aggregations": AGGREGATIONS,
        "server-optimizers": SERVER_OPTIMIZERS,
    }
    return {
        kind: {name: registry.find(name) for name in registry.names()}
        for kind, registry in registries.items()
    }


def show(
    name: str = typer.Argument(
        help="An algorithm, an upload transform, an aggregation or a server optimizer; see "
        "`parsifl list`."
    ),
    as_json: bool = _JSON,
) -> None:
    """Show an algorithm or a change to one: its equations, settings, messages and citation.

    Example:

      parsifl show scaffold
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    described = describe(name)
    if as_json:
        typer.echo(json.dumps(described))
        return
    console = Console()
    width = min(console.width, _WIDTH)

    def write(text: str) -> None:
        console.print(text, markup=False, highlight=False, width=width)

    console.print(f"[bold]{described['class']}[/bold]", highlight=False)
    if "cites" in described:
        write(f"{described['cites']}\n")
    write(plain_text.docstring(described["text"], width))
    title = f"\nSettings ({described['written']})"
    table = Table(box=None, title=title, title_justify="left", width=width)
    for column in ("name", "values", "default", "description"):
        table.add_column(column, no_wrap=column == "name", header_style="dim")
    for field in described["fields"]:
        row = (field["name"], field["type"], _value(field["default"]), field["description"])
        table.add_row(*(Text(cell) for cell in row))
    if described["fields"]:
        console.print(table)
    if "down" in described:
        _write_messages(described, write)


def _write_messages(described: dict[str, Any], write: Callable[[str], None]) -> None:
    """Write the presets, messages and requirements of an algorithm."""
    if described["presets"]:
        write("\nPresets (--set preset=name):")
    for name, preset in described["presets"].items():
        values = ", ".join(f"{key}={_value(value)}" for key, value in preset["settings"].items())
        notes = "; ".join(note for note in (preset["source"], preset["run"]) if note)
        write(f"  {name}: {values}\n    {notes}")
    write(f"\nsent down: {described['down']}\nsent up: {described['up']}")
    write(f"kept on the client: {described['client']}")
    for capability, offered in described["requires"].items():
        write(f"needs a problem that is {capability}" + (offered and f": {offered}"))


def describe(name: str) -> dict[str, Any]:
    """Return the content of `show` as plain values."""
    import dataclasses

    from parsifl.core import registry
    from parsifl.core.problem import OFFERED_BY

    changes = _changes()
    for option, parts in zip(_OPTIONS, changes.values(), strict=True):
        if registry.plain(name) in parts:
            return _describe_change(registry.plain(name), parts[registry.plain(name)], option)
    try:
        algorithm = registry.find(name)()
    except ConfigError:
        known = [*registry.algorithms(), *(each for parts in changes.values() for each in parts)]
        raise ConfigError(unknown("algorithm or change to one", name, known)) from None
    kind, trees = type(algorithm), algorithm.tree_types()
    return {
        "name": kind.__name__.lower(),
        "class": kind.__name__,
        "cites": kind.cites,
        "text": inspect.getdoc(kind) or "",
        "fields": _settings(algorithm),
        "written": "--set name=value",
        "presets": {name: dataclasses.asdict(preset) for name, preset in kind.presets.items()},
        "down": _type_name(trees.downlink),
        "up": _type_name(trees.uplink),
        "client": _type_name(trees.client),
        "requires": {c.__name__: OFFERED_BY.get(c, "") for c in kind.requires},
    }


def _describe_change(name: str, kind: type[Any], option: str) -> dict[str, Any]:
    import dataclasses

    fields = _settings(kind()) if dataclasses.is_dataclass(kind) else []
    return {
        "name": name,
        "class": kind.__name__,
        "text": inspect.getdoc(kind) or "",
        "fields": fields,
        "written": f"{option} {name}:name=value" if fields else f"{option} {name}",
    }


def _settings(configured: Any) -> list[dict[str, Any]]:
    """Return name, range, default and description of every field of a dataclass instance."""
    import dataclasses

    from parsifl.core import config

    kind = type(configured)
    values, known = config.to_json(configured), _descriptions(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        {
            "name": each.name,
            "type": _range(hints[each.name]),
            "default": values[each.name],
            "description": known.get(each.name, ""),
        }
        for each in dataclasses.fields(kind)
    ]


def _descriptions(kind: type) -> dict[str, str]:
    """Return the description of every setting, from the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= plain_text.parameters(inspect.cleandoc(vars(base).get("__doc__") or ""))
    return texts


def _range(hint: Any) -> str:
    """Return a description of the values that a setting may have.

    >>> from parsifl.core.config import Count, Fraction, Positive
    >>> _range(Positive), _range(Fraction), _range(Count | None)
    ('float > 0', 'float in [0, 1]', 'int >= 1, or none')
    """
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _bounded(arguments[0].__name__, arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is tuple:
        inner = arguments[0]
        return "tuples, in Python" if typing.get_origin(inner) else f"{_range(inner)}s, as 1+2"
    if origin in (typing.Union, types.UnionType):
        parts = [_range(part) for part in arguments if part is not type(None)]
        return ", or ".join([*parts, *["none"] * (type(None) in arguments)])
    return str(getattr(hint, "__name__", hint))


def _bounded(name: str, bounds: typing.Sequence[Any]) -> str:
    limits = {
        part: getattr(bound, part)
        for bound in bounds
        for part in _LIMITS
        if getattr(bound, part, LARGEST) != LARGEST
    }
    if len(limits) == 2:
        low, high = (f"{limit:g}" for limit in limits.values())
        left, right = ("[" if "ge" in limits else "("), ("]" if "le" in limits else ")")
        return f"{name} in {left}{low}, {high}{right}"
    return " ".join([name, *(f"{_LIMITS[part]} {limit:g}" for part, limit in limits.items())])


def _value(default: Any) -> str:
    """Return a default in the syntax of `--set`."""
    if default is None:
        return "none"
    if isinstance(default, list):
        return "+".join(map(str, default)) or "()"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _type_name(kind: Any) -> str:
    if kind is None or kind is type(None):
        return "nothing"
    if isinstance(kind, str):
        return kind
    full_name = str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
    return re.sub(r"\b(?:\w+\.)+(\w)", r"\1", full_name)


def _first_line(thing: Any) -> str:
    return _first(inspect.getdoc(thing) or "")


def _first(text: str) -> str:
    return text.partition("\n")[0]
