"""The coefficients of a regression, from what an estimator says of itself (`summary_values`)."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parsifl.engine.run_dir import DAMAGED, RunData
from parsifl.report.table import Cell, Column, Grid

_FILE = "model.json"
_LEFT, _WIDE, _ROW, _REACH = 90, 300, 18, 1.96


def coefficient_sheets(runs: Sequence[RunData], name: str) -> list[Grid]:
    """Return a table for each run whose directory holds an estimator with a summary."""
    found: list[Grid] = []
    for run in runs:
        try:
            caption = f"Coefficients, {run.path.name}"
            found.append(coefficient_sheet(_summary(run), f"{name}{len(found)}", caption))
        except (OSError, *DAMAGED):  # no regression, or a damaged file: the rest is shown
            continue
    return found


def coefficient_block(
    sheets: Sequence[Grid], runs: Sequence[RunData], name: str, level: int
) -> str:
    """Return the section with these tables, and forest plots by site; empty without tables."""
    if not sheets:
        return ""
    tables = "".join(sheet.to_html() for sheet in sheets)
    for run in runs:
        try:
            tables += forest_plots(_summary(run))
        except (OSError, *DAMAGED):
            continue
    title = f'<h{level} class="title" id="{html.escape(name)}-h8">Coefficients</h{level}>'
    return f'<section class="block" aria-labelledby="{name}-h8">{title}{tables}</section>'


def _summary(run: RunData) -> Mapping[str, Any]:
    found = json.loads((run.path / _FILE).read_text(encoding="utf-8"))["summary"]
    if not isinstance(found, dict):
        raise TypeError("not a summary")
    return found


def coefficient_sheet(summary: Mapping[str, Any], name: str, caption: str) -> Grid:
    """Return the table of coefficients; the methods paragraph below it ends in the guarantee."""
    head, *rows = [[str(cell) for cell in row] for row in summary["table"]]
    if any(len(row) != len(head) for row in rows):
        raise ValueError("rows of unequal lengths")
    columns = (Column("coefficient", numeric=False), *(Column(title) for title in head[1:]))
    cells = tuple(tuple(Cell(text) for text in row) for row in rows)
    return Grid(name, caption, columns, cells, (str(summary["methods"]),))


def forest_plots(summary: Mapping[str, Any]) -> str:
    """Return a forest plot for each coefficient, the intercept excepted."""
    sites = [str(site) for site in summary["clients"]]
    plots = [_forest(entry, sites) for entry in summary["sites"] if entry["name"] != "(intercept)"]
    return f'<div class="plots">{"".join(plots)}</div>'


def _forest(entry: Mapping[str, Any], sites: Sequence[str]) -> str:
    """Return one coefficient by site as SVG: estimates, and 1.96 standard errors to each side."""
    found = [
        (f"site {site}", float(value), _REACH * float(error))
        for site, value, error in zip(sites, entry["estimates"], entry["errors"], strict=True)
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
