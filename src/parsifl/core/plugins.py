"""Entry points: what other folders and other packages add to the simulator.

| group | what an entry is |
|-|-|
| `parsifl.algorithms` | a module with final subclasses of `FederatedAlgorithm` |
| `parsifl.commands` | a function or a `typer.Typer`, a subcommand of `parsifl` |
| `parsifl.engines` | a function that runs an experiment: `parsifl run --engine NAME` |
| `parsifl.owners` | "ledgers" shows or changes what a site has released: `parsifl flower site` |
| `parsifl.reports` | "page" writes the page about run directories, "table" prints a table |
| `parsifl.sections` | a function that adds a section about some runs to the page |
| `parsifl.templates` | a `flower.app_template.Template` of `parsifl flower init` |

The simulator itself imports none of these modules.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from parsifl.core.errors import ConfigError, unknown

ALGORITHMS = "parsifl.algorithms"
COMMANDS = "parsifl.commands"
ENGINES = "parsifl.engines"
OWNERS = "parsifl.owners"
REPORTS = "parsifl.reports"
SECTIONS = "parsifl.sections"
TEMPLATES = "parsifl.templates"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, sorted by name; two packages may use one name."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def names(group: str) -> list[str]:
    """Return the names of a group, sorted."""
    return sorted({entry.name for entry in entries(group)})


def load(group: str, name: str) -> Any:
    """Return the object of an entry point; raise ConfigError if there is none or it is broken."""
    known = {entry.name: entry for entry in entries(group)}
    if name not in known:
        raise ConfigError(unknown(group.removeprefix("parsifl.").removesuffix("s"), name, known))
    try:
        return known[name].load()
    except ImportError as error:
        raise ConfigError(
            f"the entry point '{name}' of the group {group} cannot be imported ({error}); repair "
            "or uninstall the package that has it"
        ) from error
