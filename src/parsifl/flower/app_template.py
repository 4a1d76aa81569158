"""Write a complete Flower app: pyproject.toml, server, client, README."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, final

import tomli_w

from parsifl.core import plugins
from parsifl.core.errors import ConfigError, unknown
from parsifl.engine.safe_files import reject_links, replace_file

PACKAGE = "federation"
PUBLISHER = "parsifl"
PARTITION = "partition"
_SUFFIX = ".tmpl"


@final
@dataclass(frozen=True)
class Template:
    """A kind of app.

    Parameters
    ----------
    folder
        The directory of its files, each with the suffix `.tmpl`.
    defaults
        Returns the settings of the experiment that differ from its defaults, for an algorithm
        (None: the default one).
    reads_dataset
        Whether nodes read their part of a registered dataset; otherwise they have their own data.
    write_examples
        Writes synthetic data of some clients to a new directory.
    """

    folder: Traversable
    defaults: Callable[[str | None], dict[str, Any]] = lambda _: {"algorithm": "fedavg"}
    reads_dataset: bool = False
    write_examples: Callable[[Path], None] | None = None


def _shipped() -> dict[str, Template]:
    folder = resources.files("parsifl.flower") / "templates"
    return {
        "csv": Template(folder / "csv"),
        PARTITION: Template(folder / PARTITION, reads_dataset=True),
    }


def templates() -> list[str]:
    """Return the names of the templates, those of other packages included."""
    return sorted([*_shipped(), *plugins.names(plugins.TEMPLATES)])


def find(name: str) -> Template:
    """Return a template by name."""
    if name not in templates():
        raise ConfigError(unknown("template", name, templates()))
    shipped = _shipped()
    if name in shipped:
        return shipped[name]
    template: Template = plugins.load(plugins.TEMPLATES, name)
    return template


def write_app(
    folder: Path, template: str, config: Mapping[str, Any], name: str, *, replace: bool = False
) -> None:
    """Write an app with this configuration.

    A directory that already contains an app is rejected; with `replace`, an app that Parsifl wrote
    under the same name is replaced file by file.
    """
    kind = find(template)
    if not (replace and _is_app(folder, name)):
        written = [folder / PACKAGE, *(folder / file for file in _files(kind))]
        existing = [path.name for path in written if path.exists()]
        if "pyproject.toml" in existing:
            raise ConfigError(f"{folder} already holds an app; choose another directory")
        if existing:
            raise ConfigError(
                f"{folder} already holds {', '.join(existing)}, which would be overwritten; choose "
                "another directory"
            )
    reject_links(folder, folder / PACKAGE)
    (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
    replace_file(folder / PACKAGE / "__init__.py", b'"""A federation with parsifl."""\n')
    for source in sorted(kind.folder.iterdir(), key=lambda file: file.name):
        target = source.name.removesuffix(_SUFFIX)
        inside = folder / PACKAGE / target if target.endswith(".py") else folder / target
        replace_file(inside, source.read_text().encode())
    if kind.write_examples is not None:
        kind.write_examples(folder / "examples")
    replace_file(folder / "pyproject.toml", tomli_w.dumps(_project(name, config)).encode())


def write_units(folder: Path, host: str, node: int) -> list[Path]:
    """Write the systemd units of server and node, and their environment; return the files."""
    sources = sorted(resources.files("parsifl.flower").joinpath("units").iterdir(), key=str)
    targets = [folder / source.name for source in sources]
    if existing := [path.name for path in targets if path.exists() or path.is_symlink()]:
        raise ConfigError(f"{folder} already holds {', '.join(existing)}; choose another directory")
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in zip(sources, targets, strict=True):
        text = source.read_text().replace("fl.example.org", host)
        text = text.replace("partition-id=1", f"partition-id={node}")
        replace_file(
            target, text.replace("/etc/parsifl/node1", f"/etc/parsifl/node{node}").encode()
        )
    return targets


def _files(kind: Template) -> list[str]:
    """Return the files written next to the package."""
    names = (file.name.removesuffix(_SUFFIX) for file in kind.folder.iterdir())
    outside = [name for name in sorted(names) if not name.endswith(".py")]
    return ["pyproject.toml", *outside, *(["examples"] if kind.write_examples else [])]


def _is_app(folder: Path, name: str) -> bool:
    """Return whether a directory contains an app that Parsifl wrote under this name."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        return bool(
            project["project"]["name"] == name
            and project["tool"]["flwr"]["app"]["publisher"] == PUBLISHER
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _project(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "0.1.0",
            "description": "A federation with parsifl",
            "license": "Apache-2.0",
            # empty: nodes have parsifl installed, and Flower must not install anything
            "dependencies": [],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": PUBLISHER,
                    # only code goes to the nodes: a run directory next to it describes all clients
                    "fab-include": [f"/{PACKAGE}/**/*.py"],
                    "components": {
                        "serverapp": f"{PACKAGE}.server_app:app",
                        "clientapp": f"{PACKAGE}.client_app:app",
                    },
                    "config": dict(config),
                }
            },
        },
    }
