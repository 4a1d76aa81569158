"""Turns the scripts in examples/ into notebooks: a script is the only source of both.

A script is divided by lines `# %%` (code) and `# %% [markdown]` (comments are text). Its docstring
becomes the first cell.

    python docs/notebooks.py FOLDER
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
_MARK = re.compile(r"^# %%(.*)$", re.MULTILINE)


def cells(script: str) -> list[tuple[str, str]]:
    """Return the kind ("markdown" or "code") and the text of each cell.

    >>> cells('"A title."' + chr(10) + "x = 1" + chr(10) + "# %% [markdown]" + chr(10) + "# Hi")
    [('markdown', '# A title.'), ('code', 'x = 1'), ('markdown', 'Hi')]
    """
    first, *rest = _MARK.split(script)
    opening, code = _opening(first)
    found = [("markdown", opening), ("code", code)]
    for mark, text in zip(rest[::2], rest[1::2], strict=True):
        if "[markdown]" in mark:
            lines = [re.sub(r"^# ?", "", line) for line in text.strip().splitlines()]
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", text))
    return [(kind, text.strip()) for kind, text in found if text.strip()]


def _opening(text: str) -> tuple[str, str]:
    """Take the docstring off; its first line is the title."""
    module = ast.parse(text)
    head = module.body[0] if module.body else None
    words = ast.get_docstring(module)
    if words is None or head is None or head.end_lineno is None:
        return "", text
    return f"# {words}", "\n".join(text.splitlines()[head.end_lineno :])


def notebook(script: str) -> dict[str, Any]:
    """Return a notebook (nbformat 4.5) without outputs."""
    made = []
    for number, (kind, text) in enumerate(cells(script)):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def scripts() -> list[Path]:
    """Return the examples, by name."""
    return sorted(EXAMPLES.glob("*.py"))


def write(folder: Path) -> list[Path]:
    """Write a notebook for every example."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for script in scripts():
        path = folder / f"{script.stem}.ipynb"
        path.write_text(json.dumps(notebook(script.read_text()), indent=1) + "\n")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks")):
        sys.stdout.write(f"{path}\n")
