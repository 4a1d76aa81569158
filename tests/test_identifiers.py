"""Names say what a value is: vague ones do not come back.

`python -m tests.test_identifiers` writes the budget. It may only fall.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = Path(__file__).parent / "golden" / "identifiers.json"
VAGUE = {
    *("found", "own", "place", "places", "kept", "given", "whole"),  # how it came about, or where
    *("slope", "slopes", "bend", "bends", "fall", "pull", "dust"),  # gradient, hessian, ...
    *("res", "item", "data2"),  # as vague as the words above
}
FILES = sorted((ROOT / "src").rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def bound(tree: ast.AST) -> Iterator[str]:
    """Yield every name that is assigned, and every argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def vague(path: Path) -> int:
    """Return how often a file binds a vague name."""
    counts = Counter(bound(ast.parse(path.read_text())))
    return sum(counts[word] for word in VAGUE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_binds_no_more_vague_names_than_its_budget(path: Path) -> None:
    budget = json.loads(BUDGET.read_text()).get(name(path), 0)
    count = vague(path)
    assert count <= budget, f"{count} vague names, {budget} allowed: say what the values are"
    assert count == budget, f"only {count} vague names: lower the budget from {budget}"


def test_the_test_sees_a_vague_name(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("def f(given):\n    for place, (own, x) in given:\n        kept = x\n")
    assert vague(file) == 4


def main() -> None:
    counts = {name(path): vague(path) for path in FILES}
    BUDGET.write_text(json.dumps({k: v for k, v in counts.items() if v}, indent=1) + "\n")


if __name__ == "__main__":
    main()
