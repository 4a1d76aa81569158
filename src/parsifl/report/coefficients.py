"""The coefficients of a regression, from the estimator that a deployment saved."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parsifl.engine.run_data import DAMAGED, RunData
from parsifl.report.table import Cell, Column, Grid

_FILE = "model.json"
_LEFT, _WIDE, _ROW, _REACH = 90, 300, 18, 1.96


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


def coefficient_block(
    sheets: Sequence[Grid], runs: Sequence[RunData], name: str, level: int
) -> str:
    """Return the section with these tables, and forest plots by site; empty without tables."""
    if not sheets:
        return ""
    tables = "".join(sheet.to_html() for sheet in sheets)
    tables += "".join(_forests(run) for run in runs)
    title = f'<h{level} class="title" id="{html.escape(name)}-h8">Coefficients</h{level}>'
    return f'<section class="block" aria-labelledby="{name}-h8">{title}{tables}</section>'


def _forests(run: RunData) -> str:
    """Return a forest plot for each coefficient of a run, the intercept excepted."""
    try:
        entries = json.loads((run.path / _FILE).read_text(encoding="utf-8"))["summary"]["sites"]
        plots = [_forest(entry) for entry in entries if entry["name"] != "(intercept)"]
    except (OSError, *DAMAGED):
        return ""
    return f'<div class="forests">{"".join(plots)}</div>'


def _forest(entry: Mapping[str, Any]) -> str:
    """Return one coefficient by site as SVG: estimates, and 1.96 standard errors to each side."""
    found = [
        (f"site {site}", float(value), _REACH * float(error))
        for site, (value, error) in enumerate(zip(entry["estimates"], entry["errors"], strict=True))
        if value is not None and error is not None
    ]
    rows = [*found, ("all sites", float(entry["all"]), 0.0)]
    low = min(0.0, *(value - half for _, value, half in rows))
    high = max(0.0, *(value + half for _, value, half in rows))
    if not math.isfinite(high - low):
        raise ValueError("not finite")

    def at(value: float) -> str:
        return f"{_LEFT + _WIDE * (value - low) / ((high - low) or 1.0):.1f}"

    height = _ROW * (len(rows) + 1)
    marks = [f'<line x1="{at(0)}" x2="{at(0)}" y1="0" y2="{height}" stroke="currentColor"/>']
    for number, (label, value, half) in enumerate(rows):
        y = _ROW * (number + 1)
        marks.append(
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="currentColor" '
            f'font-size="12">{html.escape(label)}</text><line x1="{at(value - half)}" '
            f'x2="{at(value + half)}" y1="{y}" y2="{y}" stroke="currentColor"/>'
            f'<rect x="{float(at(value)) - 3:.1f}" y="{y - 3}" width="6" height="6" '
            'fill="currentColor"/>'
        )
    title = html.escape(str(entry["name"]))
    shown = html.escape(f"{entry['name']}: {low:.3g} to {high:.3g}")
    return (
        f'<figure><figcaption>{shown}</figcaption><svg viewBox="0 0 {_LEFT + _WIDE + 10} {height}" '
        f'role="img" aria-label="{title} by site" style="max-width:32rem">{"".join(marks)}</svg>'
        "</figure>"
    )
