"""Write a complete Flower app: pyproject.toml, server, client, README."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key
from parsifl.engine.safe_files import reject_links, replace_file

PACKAGE = "federation"
PUBLISHER = "parsifl"
PARTITION = "partition"
REGRESSION = "sparse-regression"
_SUFFIX = ".tmpl"


def templates() -> list[str]:
    """Return the names of the templates."""
    return sorted(place.name for place in _root().iterdir() if place.is_dir())


def write_app(
    folder: Path, template: str, config: Mapping[str, Any], name: str, *, replace: bool = False
) -> None:
    """Write an app with this configuration.

    A directory that already contains an app is rejected; with `replace`, an app that Parsifl wrote
    under the same name is replaced file by file.
    """
    if template not in templates():
        raise ConfigError(unknown("template", template, templates()))
    if not (replace and _is_app(folder, name)):
        written = [folder / PACKAGE, *(folder / file for file in _files(template))]
        found = [path.name for path in written if path.exists()]
        if "pyproject.toml" in found:
            raise ConfigError(f"{folder} already holds an app; choose another directory")
        if found:
            raise ConfigError(
                f"{folder} already holds {', '.join(found)}, which would be overwritten; choose "
                "another directory"
            )
    reject_links(folder, folder / PACKAGE)
    (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
    replace_file(folder / PACKAGE / "__init__.py", b'"""A federation with parsifl."""\n')
    for place in sorted(_root().joinpath(template).iterdir(), key=lambda found: found.name):
        target = place.name.removesuffix(_SUFFIX)
        inside = folder / PACKAGE / target if target.endswith(".py") else folder / target
        replace_file(inside, place.read_text().encode())
    if template == REGRESSION:
        _write_examples(folder / "examples")
    replace_file(folder / "pyproject.toml", tomli_w.dumps(_project(name, config)).encode())


def _files(template: str) -> list[str]:
    """Return the files written next to the package."""
    names = (place.name.removesuffix(_SUFFIX) for place in _root().joinpath(template).iterdir())
    own = [name for name in sorted(names) if not name.endswith(".py")]
    return ["pyproject.toml", *own, *(["examples"] if template == REGRESSION else [])]


def _is_app(folder: Path, name: str) -> bool:
    """Return whether a directory contains an app that Parsifl wrote under this name."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text())
        return bool(
            found["project"]["name"] == name
            and found["tool"]["flwr"]["app"]["publisher"] == PUBLISHER
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _write_examples(folder: Path) -> None:
    """Write synthetic tables of three hospitals of unequal size, with words and missing values."""
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
