"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 50
    assert "parsifl.core.tree" in imports(ROOT / "src/parsifl/engine/state_store.py")


def test_only_the_tree_module_may_know_about_pytrees() -> None:
    culprits = {
        name(path)
        for path in FILES
        if path != ROOT / "src/parsifl/core/tree.py"
        and (
            any("_pytree" in imported for imported in imports(path))
            or ("torch.utils." + "_pytree") in path.read_text()
        )
    }
    assert not culprits


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_global_generators_are_named_in_no_source_but_where_they_are_guarded() -> None:
    """Randomness comes from keys; a module factory runs under a forked generator."""
    allowed = {
        "src/parsifl/nn/neural.py",
        "src/parsifl/testing/conformance/checks.py",
    }
    words = ("torch.manual_seed(", "np.random.seed(", "random.seed(", "np.random.rand")
    found = {name(p) for p in SOURCES if any(word in p.read_text() for word in words)}
    assert found <= allowed


def test_algorithms_import_only_what_lies_below_them() -> None:
    banned = ("parsifl.wire", "parsifl.engine", "parsifl.data", "parsifl.cli", "parsifl.testing")
    wrong = {
        (name(path), imported)
        for path in (ROOT / "src/parsifl/algorithms").glob("*.py")
        for imported in imports(path)
        if imported.startswith(banned)
    }
    assert not wrong


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name(path))
    assert {kind: places for kind, places in found.items() if len(places) > 1} == {}
