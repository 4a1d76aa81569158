"""One term per idea: words that were retired do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    r"judg(?:e[sd]?|ing)": "evaluate",
    r"yardsticks?": "baseline",
    r"perceptrons?": "MLP",
    r"pictures?": "image, figure",
    r"told|tells?|telling": "name, show, return",
    r"anew": "again",
    r"go(?:es|ing)? on|went on": "resume, continue",
    r"at hand": "available",
    r"so many": "this many",
    r"dear(?:er|est)?": "expensive",
    r"whoever": "the caller, the thread",
    r"nobody|everybody": "no client, every client",
    r"data sets?": "dataset",
    r"run folders?": "run directory",
    r"refused by": "rejected",
    r"as (?:it comes|they come)(?! from)": "default settings",
    r"training pool": "eligible clients",
    r"engine=[\"']sequential[\"']": 'executor="loop"',
}
"""Each word with what to write instead."""

ALLOWED = {
    ("src/parsifl/nn/models/mlp.py", "perceptron"),  # spells the abbreviation out
    ("CHANGELOG.md", "picture"),  # the table of renames
    ("CHANGELOG.md", "judge"),
    ("CHANGELOG.md", 'engine="sequential"'),
}
FILES = [
    path
    for pattern in (
        "src/**/*.py",
        "src/**/*.js",
        "src/**/*.html",
        "reproduction/src/**/*.py",
        "reproduction/src/**/*.md",
        "docs/**/*.md",
        "docs/*.py",
        "*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if not any(path.is_relative_to(ROOT / left_out) for left_out in ("docs/assets", "src/build"))
]
_RETIRED = re.compile("|".join(rf"\b(?:{word})(?!\w)" for word in RETIRED), re.IGNORECASE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_files() -> None:
    assert len(FILES) > 200


@pytest.mark.parametrize("path", FILES, ids=name)
def test_retired_words_are_not_used(path: Path) -> None:
    found = [
        f"{name(path)}:{number}: '{word}' in {line.strip()!r}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in _RETIRED.findall(line)
        if (name(path), word.lower()) not in ALLOWED
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/adr/*.md")), ids=name)
def test_decisions_have_a_status_and_a_date_and_fit_on_a_page(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^Status: \w+.*Date: \d{4}-\d\d-\d\d\.$", text, re.MULTILINE)
    assert len(text.split()) < 500
