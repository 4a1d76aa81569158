"""The coefficients of a regression, from the estimator that a deployment saved."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from parsifl.engine.run_data import DAMAGED, RunData
from parsifl.report.table import Cell, Column, Grid

_FILE = "model.json"


def coefficient_sheets(runs: Sequence[RunData], name: str) -> list[Grid]:
    """Return a table for each run whose directory holds an estimator with a summary."""
    found: list[Grid] = []
    for run in runs:
        try:
            summary = json.loads((run.path / _FILE).read_text(encoding="utf-8"))["summary"]
            head, *rows = [[str(cell) for cell in row] for row in summary["table"]]
            notes = (str(summary["guarantee"]), str(summary["methods"]))
        except (OSError, *DAMAGED):  # no regression, or a damaged file: the rest is shown
            continue
        if any(len(row) != len(head) for row in rows):
            continue
        columns = (Column("coefficient", numeric=False), *(Column(title) for title in head[1:]))
        cells = tuple(tuple(Cell(text) for text in row) for row in rows)
        caption = f"Coefficients, {run.path.name}"
        found.append(Grid(f"{name}{len(found)}", caption, columns, cells, notes))
    return found


def coefficient_block(sheets: Sequence[Grid], name: str, level: int) -> str:
    """Return the section with these tables; empty if there are none."""
    if not sheets:
        return ""
    tables = "".join(sheet.to_html() for sheet in sheets)
    title = f'<h{level} class="title" id="{html.escape(name)}-h8">Coefficients</h{level}>'
    return f'<section class="block" aria-labelledby="{name}-h8">{title}{tables}</section>'
