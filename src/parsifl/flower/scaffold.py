"""Writes a ready Flower app: pyproject.toml, server, client, README."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from parsifl.errors import ConfigError, unknown

PACKAGE = "federation"
_SUFFIX = ".tmpl"


def templates() -> list[str]:
    """Return the names of the templates."""
    return sorted(place.name for place in _root().iterdir() if place.is_dir())


def write_app(folder: Path, template: str, config: Mapping[str, Any], name: str) -> None:
    """Write an app with this configuration; a folder that holds one already is left alone."""
    if template not in templates():
        raise ConfigError(unknown("template", template, templates()))
    if (folder / "pyproject.toml").exists():
        raise ConfigError(f"{folder} already holds an app; choose another folder")
    (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
    (folder / PACKAGE / "__init__.py").write_text('"""A federation with parsifl."""\n')
    for place in sorted(_root().joinpath(template).iterdir(), key=lambda found: found.name):
        target = place.name.removesuffix(_SUFFIX)
        inside = folder / PACKAGE / target if target.endswith(".py") else folder / target
        inside.write_text(place.read_text())
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project(name, config)))


def _root() -> Any:
    return resources.files("parsifl.flower") / "templates"


def _project(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "0.1.0",
            "description": "A federation with parsifl",
            "license": "Apache-2.0",
            # nothing: nodes have parsifl installed, and Flower is told not to install anything
            "dependencies": [],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "parsifl",
                    "components": {
                        "serverapp": f"{PACKAGE}.server_app:app",
                        "clientapp": f"{PACKAGE}.client_app:app",
                    },
                    "config": dict(config),
                }
            },
        },
    }
