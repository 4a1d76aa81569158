"""Writes a ready Flower app: pyproject.toml, server, client, README."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key

PACKAGE = "federation"
PARTITION = "partition"
REGRESSION = "sparse-regression"
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
    if template == REGRESSION:
        _write_examples(folder / "examples")
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project(name, config)))


def _write_examples(folder: Path) -> None:
    """Write made-up tables of three hospitals of unequal size, with words and missing values."""
    folder.mkdir()
    for hospital, rows in enumerate((120, 80, 200)):
        draw = Key(0, client=hospital, purpose="flower/example").numpy_generator()
        age, pulse = draw.normal(55 + 3 * hospital, 12, rows), draw.normal(75, 9, rows)
        noise = draw.normal(size=(rows, 12))
        ward = draw.choice(["general", "heart", "surgery"], rows)
        days = 2 + 0.08 * age + 1.5 * (ward == "surgery") - 0.9 * noise[:, 3]
        days += 0.2 * draw.normal(size=rows)
        lost = draw.random((rows, 2)) < 0.05
        names = ["age", "pulse", "ward", *(f"marker{i}" for i in range(12)), "days"]
        lines = [",".join(names)]
        for i in range(rows):
            known = [
                "" if lost[i, 0] else f"{age[i]:.1f}",
                f"{pulse[i]:.1f}",
                "NA" if lost[i, 1] else str(ward[i]),
            ]
            numbers = [f"{value:.4f}" for value in (*noise[i], days[i])]
            lines.append(",".join([*known, *numbers]))
        (folder / f"hospital{hospital}.csv").write_text("\n".join(lines) + "\n")


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
                    # code alone goes to the nodes: a run folder beside it tells of all clients
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
