"""Files that a stranger meets first: citation, workflows, templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import parsifl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("file", ["pyproject.toml", "reproduction/pyproject.toml"])
def test_every_distribution_has_the_version_of_the_package(file: str) -> None:
    project = tomllib.loads((ROOT / file).read_text())["project"]
    assert project["version"] == parsifl.__version__


def test_the_citation_and_the_changelog_name_the_version() -> None:
    assert f"\nversion: {parsifl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == parsifl.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    called = set(re.findall(r"run: make ([a-z-]+)", text))
    for listed in re.findall(r"target: \[([^\]]+)\]", text):
        called |= set(listed.split(", "))
    assert called
    assert called <= targets


def test_ci_runs_what_the_workflow_runs() -> None:
    local = set(
        re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[-1].split()
    )
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert all(re.search(rf"\b{target}\b", text) for target in local)
