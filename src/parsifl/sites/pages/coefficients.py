"""The coefficients of a regression, from the summary of an estimator (`summary_values`)."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parsifl.engine.run_dir import DAMAGED, RunData
from parsifl.report.table import Cell, Column, ExtraSection, Grid

_FILE = "model.json"
_LEFT, _WIDE, _ROW, _REACH = 90, 300, 18, 1.96
_TALL, _RIGHT = 180, 110
_MOST_LINES = 12
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


def section(runs: Sequence[RunData], name: str, level: int) -> ExtraSection | None:
    """Return the section about the runs whose directory holds an estimator with a summary."""
    tables: list[Grid] = []
    plots = ""
    for run in runs:
        try:
            summary = _summary(run)
            tables += summary_sheets(summary, f"{name}-coefficients{len(tables)}", run.path.name)
            plots += summary_plots(summary)
        except (OSError, *DAMAGED):  # not a regression, or a damaged file: show the rest
            continue
    if not tables:
        return None
    title = f'<h{level} class="title" id="{html.escape(name)}-h8">Coefficients</h{level}>'
    content = "".join(table.to_html() for table in tables) + plots
    block = f'<section class="block" aria-labelledby="{name}-h8">{title}{content}</section>'
    return ExtraSection(tables, block)


def _summary(run: RunData) -> Mapping[str, Any]:
    summary = json.loads((run.path / _FILE).read_text(encoding="utf-8"))["summary"]
    if not isinstance(summary, dict):
        raise TypeError("not a summary")
    return summary


def summary_sheets(summary: Mapping[str, Any], name: str, label: str = "") -> list[Grid]:
    """Return the table of coefficients, and those of the number of terms and of sites."""
    after = f", {label}" if label else ""
    sheets = [coefficient_sheet(summary, name, f"Coefficients{after}")]
    if "path" in summary:
        sheets.append(_path_sheet(summary["path"], f"{name}-terms", f"Number of terms{after}"))
    if "fit" in summary:
        sites = [f"site {site}" for site in summary["clients"]]
        sheets.append(_site_sheet(summary["fit"], sites, f"{name}-sites", f"Fit by site{after}"))
    return sheets


def summary_plots(summary: Mapping[str, Any]) -> str:
    """Return all figures that can be drawn from the aggregates of a fit, as SVG."""
    drawn = []
    if "path" in summary:
        drawn.append(_path_plot(summary["path"]))
        if "error" in summary["path"]:
            drawn.append(_error_plot(summary["path"]))
    fit, sites = summary.get("fit", {}), [str(site) for site in summary["clients"]]
    if "excess" in fit:
        entry = {"name": "observed minus predicted", "all": 0.0, "errors": fit["error"]}
        drawn.append(_forest({**entry, "estimates": fit["excess"]}, sites))
    drawn += [_forest(entry, sites) for entry in summary["sites"] if entry["name"] != "(intercept)"]
    return f'<div class="plots">{"".join(drawn)}</div>'


def coefficient_sheet(summary: Mapping[str, Any], name: str, caption: str) -> Grid:
    """Return the table of coefficients; the methods paragraph below it ends in the guarantee."""
    head, *rows = [[str(cell) for cell in row] for row in summary["table"]]
    if any(len(row) != len(head) for row in rows):
        raise ValueError("rows of unequal lengths")
    columns = (Column("coefficient", numeric=False), *(Column(title) for title in head[1:]))
    cells = tuple(tuple(Cell(text) for text in row) for row in rows)
    return Grid(name, caption, columns, cells, (str(summary["methods"]),))


def _path_sheet(path: Mapping[str, Any], name: str, caption: str) -> Grid:
    """Return the results and the terms for each number of terms."""
    names = [str(term) for term in path["names"]]
    criteria = ("aic", "bic", "ebic", "gic")
    columns = [Column("terms"), *(Column(title.upper()) for title in criteria)]
    lists: list[Sequence[Any]] = [[each[key] for each in path["criteria"]] for key in criteria]
    for key, title in (("r2", "R2"), ("error", "CV error"), ("standard_error", "SE")):
        if key in path:
            columns.append(Column(title))
            lists.append(path[key])
    columns.append(Column("in the model", numeric=False))
    best = [min(values) if at < len(criteria) else None for at, values in enumerate(lists)]
    rows = []
    for i, number in enumerate(path["numbers"]):
        cells = [Cell(f"{int(number)}{' *' if number == path['chosen'] else ''}", float(number))]
        for values, least in zip(lists, best, strict=True):
            value = float(values[i])
            cells.append(Cell(_shown(value), value, best=value == least))
        used = [names[j] for j, value in enumerate(path["coefficients"][i]) if value]
        rows.append((*cells, Cell(", ".join(used))))
    note = "The best subset of each size, from the sums of this fit. * is the fit above."
    if "error" in path:
        note += " CV error: squared error on each site by the fit to the others."
    return Grid(name, caption, tuple(columns), tuple(rows), (note,))


def _shown(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _site_sheet(fit: Mapping[str, Any], sites: Sequence[str], name: str, caption: str) -> Grid:
    titles = {"rows": "rows", "residual SD": "residual SD", "deviance per row": "deviance per row"}
    titles |= {"excess": "observed minus predicted", "error": "its SE"}
    titled = [(title, fit[key]) for key, title in titles.items() if key in fit]
    columns = (Column("site", numeric=False), *(Column(title) for title, _ in titled))
    rows = []
    for i, site in enumerate(sites):
        values = [float("nan") if part[i] is None else float(part[i]) for _, part in titled]
        rows.append((Cell(site), *(Cell(f"{value:.4g}", value) for value in values)))
    note = "Fit of the common model at each site, from the last sums."
    if "excess" in fit:
        note += " Observed minus predicted is per row, of the second class or of counts."
    return Grid(name, caption, columns, tuple(rows), (note,))


def _path_plot(path: Mapping[str, Any]) -> str:
    """Return the standardised coefficients against the number of terms."""
    values = [[float(value or 0.0) for value in row] for row in path["coefficients"]]
    largest = sorted(range(len(path["names"])), key=lambda j: -max(abs(row[j]) for row in values))
    series = {
        str(path["names"][j]): [row[j] for row in values]
        for j in largest[:_MOST_LINES]
        if any(row[j] for row in values)
    }
    return _chart(
        "Coefficient path: best subsets of growing size, in standard deviations of the columns",
        [float(number) for number in path["numbers"]],
        series,
        zero=True,
    )


def _error_plot(path: Mapping[str, Any]) -> str:
    """Return the error on left-out sites, with the one-standard-error rule."""
    numbers = [float(number) for number in path["numbers"]]
    errors, spread = ([float(v) for v in path[key]] for key in ("error", "standard_error"))
    best = errors.index(min(errors))
    limit = errors[best] + spread[best]
    simple = next(int(n) for n, value in zip(numbers, errors, strict=True) if value <= limit)
    text = (
        f"Cross-validation over sites: smallest error with {int(numbers[best])} terms; one "
        f"standard error allows {simple}. Bars are standard errors, the dotted line is that bound"
    )
    return _chart(text, numbers, {"": errors}, bars=spread, line=limit)


def _chart(
    caption: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    bars: Sequence[float] = (),
    line: float | None = None,
    zero: bool = False,
) -> str:
    """Return lines over a common axis as SVG, with names at their ends."""
    ends = [value for values in series.values() for value in values] + [0.0] * zero
    for values in series.values() if bars else ():
        ends += [v + sign * bar for v, bar in zip(values, bars, strict=True) for sign in (-1, 1)]
    low, high, first, last = min(ends), max(ends), min(x), max(x)
    if not math.isfinite(high - low):
        raise ValueError("not finite")

    def across(value: float) -> str:
        return f"{_LEFT / 2 + _WIDE * (value - first) / ((last - first) or 1.0):.1f}"

    def down(value: float) -> str:
        return f"{10 + _TALL * (high - value) / ((high - low) or 1.0):.1f}"

    marks = [_text(_LEFT / 2 - 6, down(value), f"{value:.3g}", "end") for value in (low, high)]
    marks += [_text(across(value), _TALL + 28, f"{value:g}", "middle") for value in x]
    for level, dash in ((0.0 if zero else None, ""), (line, "2 3")):
        if level is not None:
            marks.append(
                f'<line x1="{across(first)}" x2="{across(last)}" y1="{down(level)}" '
                f'y2="{down(level)}" stroke="currentColor" stroke-dasharray="{dash}" '
                'opacity="0.6"/>'
            )
    for number, values in enumerate(series.values()):
        points = " ".join(f"{across(a)},{down(b)}" for a, b in zip(x, values, strict=True))
        dash = _DASHES[number % len(_DASHES)]
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="currentColor" '
            f'stroke-dasharray="{dash}"/>'
        )
        for a, b, bar in zip(x, values, bars or [0.0] * len(x), strict=True):
            marks.append(
                f'<circle cx="{across(a)}" cy="{down(b)}" r="2.5" fill="currentColor"/><line '
                f'x1="{across(a)}" x2="{across(a)}" y1="{down(b - bar)}" y2="{down(b + bar)}" '
                'stroke="currentColor"/>'
            )
    height = 0.0  # names must not overlap
    for name, values in sorted(series.items(), key=lambda entry: -entry[1][-1]):
        height = max(height + 11, float(down(values[-1])))
        marks.append(_text(float(across(last)) + 6, f"{height:.1f}", name, "start"))
    text = html.escape(caption)
    wide, tall = _LEFT / 2 + _WIDE + _RIGHT, max(_TALL + 36, height + 10)
    return (
        f'<figure><figcaption>{text}.</figcaption><svg viewBox="0 0 {wide:g} {tall:g}" role="img" '
        f'aria-label="{text}" style="max-width:40rem">{"".join(marks)}</svg></figure>'
    )


def _text(x: float | str, y: float | str, text: str, anchor: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor" font-size="11" '
        f'dominant-baseline="middle">{html.escape(text)}</text>'
    )


def _forest(entry: Mapping[str, Any], sites: Sequence[str]) -> str:
    """Return one coefficient by site as SVG: estimates, and 1.96 standard errors to each side."""
    site_rows = [
        (f"site {site}", float(value), _REACH * float(error))
        for site, value, error in zip(sites, entry["estimates"], entry["errors"], strict=True)
        if value is not None and error is not None
    ]
    rows = [*site_rows, ("all sites", float(entry["all"]), 0.0)]
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
