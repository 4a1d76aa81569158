"""One HTML page about a fitted estimator: coefficients and figures."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parsifl.report.page import render_page
from parsifl.report.table import Cell, Column, Grid
from parsifl.sites.pages.coefficients import summary_plots, summary_sheets

_COLOURS = {"#000000": "currentColor", "#ffffff": "var(--card)"}
_OURS = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.S)
_SIZE = re.compile(r' (?:width|height)="[\d.]+pt"')


def build_fit(
    model: Any,
    output: Path | str,
    X: Any = None,
    y: Any = None,
    groups: Any = None,
    *,
    test: tuple[Any, Any] | None = None,
    path: Sequence[int] | None = None,
    stability: Any = None,
) -> Path:
    """Write the report about a fitted estimator.

    The page has the table of coefficients with its guarantee, a methods paragraph, the fit by site
    and forest plots; a linear regression fitted in one round also has the best subset of each
    size with its information criteria. Other figures need matplotlib (extra `parsifl[plots]`).

    Parameters
    ----------
    model
        An estimator of `parsifl.sites`. With cross-validation, the page has its curve.
    output
        The HTML file to write; its directory is created if needed.
    X, y, groups
        The rows of the fit, for the coefficient path.
    test
        Rows (X, y) for calibration, ROC and survival curves; None: the rows of the fit, with
        captions that call them optimistic. After a deployment, use rows of one site.
    path
        Numbers of terms for the coefficient path, which takes one fit each; None: those of the
        cross-validation, or no path.
    stability
        The result of `stability_selection`.
    """
    from parsifl.sites import plots  # imports scikit-learn, which run reports do not need

    best, tried = getattr(model, "best_estimator_", model), hasattr(model, "best_estimator_")
    drawn: list[tuple[str, Any]] = []
    numbers = model.path_ if tried and path is None else path
    if numbers is not None and X is not None:
        drawn.append(
            (
                "Coefficient path. Each line is a term, in standard deviations of its column; each "
                "number of terms is a separate fit.",
                plots.coefficient_path(best, X, y, groups, path=numbers),
            )
        )
    if tried:
        drawn.append(
            (
                "Cross-validation over sites. Bars are standard errors; the dotted line is the "
                "smallest mean error plus one standard error.",
                plots.cv_curve(model),
            )
        )
    if stability is not None:
        drawn.append(
            (
                "Stability selection: how often each column is selected in random halves. At most "
                f"{stability.false_bound:.2g} false selections are expected.",
                plots.stability_plot(stability),
            )
        )
    drawn += _on_rows(best, test, X, y)
    sheets, plain = _coefficients(best)
    shown = "".join(sheet.to_html() for sheet in sheets) + plain
    sections = _block("coefficients", "Coefficients", shown)
    if drawn:
        figures = "".join(_figure(text, ax, f"plot{at}") for at, (text, ax) in enumerate(drawn))
        sections += _block("figures", "Figures", f'<div class="plots">{figures}</div>')
    data = {
        "sections": {},
        "tables": {
            sheet.name: {"csv": sheet.to_csv(), "latex": sheet.to_latex()} for sheet in sheets
        },
    }
    sites = len(best.clients_)
    title = f"{type(model).__name__} across {sites} site{'s' if sites != 1 else ''}"
    text = render_page(title, f"solver {best.solver_}: {best.solver_reason_}", sections, data)
    path_of_page = Path(output)
    path_of_page.parent.mkdir(parents=True, exist_ok=True)
    path_of_page.write_text(text, encoding="utf-8")
    return path_of_page


def _on_rows(model: Any, test: tuple[Any, Any] | None, X: Any, y: Any) -> list[tuple[str, Any]]:
    """Return the figures that need rows."""
    from parsifl.sites import plots

    rows = (X, y) if test is None else test
    if rows[0] is None:
        return []
    which = "on test rows" if test is not None else "on the rows of the fit, hence optimistic"
    if hasattr(model, "classes_") and len(model.classes_) == 2:
        return [
            (f"ROC curve, {which}.", plots.roc_plot(model, *rows)),
            (f"Calibration, {which}.", plots.calibration_plot(model, *rows)),
        ]
    if model._family() == "cox":
        text = f"Kaplan-Meier curves by predicted hazard, {which}."
        return [(text, plots.survival_plot(model, *rows))]
    return []


def _coefficients(model: Any) -> tuple[list[Grid], str]:
    from parsifl.sites.estimators.saved import summary_values

    if model._exact is not None:
        summary: Mapping[str, Any] = summary_values(model)
        return summary_sheets(summary, "coefficients"), summary_plots(summary)
    names = model.get_feature_names_out()
    columns = (Column("coefficient", numeric=False), Column("estimate"))
    values = model.coef_ if model.coef_.ndim == 1 else model.coef_[-1]
    rows = tuple(
        (Cell(str(names[i])), Cell(f"{values[i]:.4g}", float(values[i]))) for i in model.support_
    )
    note = f"solver={model.solver_!r} does not compute curvature: there are no standard errors."
    return [Grid("coefficients", "Coefficients", columns, rows, (note,))], ""


def _block(name: str, title: str, inside: str) -> str:
    head = f'<h2 class="title" id="{name}-h">{title}</h2>'
    return f'<section class="block" aria-labelledby="{name}-h">{head}{inside}</section>'


def _figure(caption: str, ax: Any, name: str) -> str:
    """Return a matplotlib figure as SVG in the colours of the page."""
    import matplotlib as mpl

    out = io.StringIO()
    # keep text as text; a fixed salt makes the ids of figures distinct and reproducible
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        ax.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = _SIZE.sub("", _OURS.sub("", out.getvalue())).strip()
    for theirs, ours in _COLOURS.items():
        svg = svg.replace(theirs, ours)
    text = html.escape(caption)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f"<figure><figcaption>{text}</figcaption>{svg}</figure>"
