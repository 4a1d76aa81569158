"""Assemble tables, figures and their script into one HTML file that works offline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import parsifl
from parsifl.core import plugins
from parsifl.core.errors import ConfigError
from parsifl.engine.run_dir import RunData, read_runs
from parsifl.report.figures import figures
from parsifl.report.groups import Section, flat, sections
from parsifl.report.html_tables import (
    cost_sheet,
    difference_sheet,
    gain_sheets,
    headline_sheet,
    ledger_sheet,
)
from parsifl.report.paired_gains import undecided
from parsifl.report.table import ExtraSection, Grid

_SCRIPTS = ("chart.js", "lines.js", "clients.js", "bars.js", "heat.js", "export.js", "page.js")
_DOCTYPE = b"<!doctype html"


def build(folders: Sequence[Path], output: Path) -> Path:
    """Write the report about some run directories.

    Parameters
    ----------
    folders
        Run directories, or directories that contain some.
    output
        The HTML file to write. Its directory is created if it is missing. Only an HTML page is
        replaced.

    Raises
    ------
    ConfigError
        If `output` exists and is not an HTML page.
    """
    left_out: list[str] = []
    runs = read_runs([Path(folder) for folder in folders], left_out)
    text = render(runs, left_out=left_out)
    output = Path(output)
    _reject_other(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    return output


def _reject_other(output: Path) -> None:
    """Raise ConfigError if a file that is not an HTML page would be replaced."""
    if not output.is_file():
        return
    with output.open("rb") as file:
        start = file.read(len(_DOCTYPE))
    if start and start.lower() != _DOCTYPE:
        raise ConfigError(f"{output} exists and is not an HTML page; choose another file")


def render(runs: Sequence[RunData], version: str = "", left_out: Sequence[str] = ()) -> str:
    """Return the page; with a `version` it polls its server for a newer one and reloads."""
    page_sections = sections(runs)
    named = {f"s{at}": section for at, section in enumerate(page_sections)}
    level = 2 if len(page_sections) == 1 else 3  # heading level: a single section needs no heading
    extras = {name: _extras(section, name, level) for name, section in named.items()}
    sheets = {
        name: {**_sheets(section, name), **{t.name: t for e in extras[name] for t in e.tables}}
        for name, section in named.items()
    }
    drawn = {name: figures(section) for name, section in named.items()}
    data = {
        "sections": drawn,
        "tables": {
            sheet.name: {"csv": sheet.to_csv(), "latex": sheet.to_latex()}
            for group in sheets.values()
            for sheet in group.values()
        },
    }
    bodies = [
        _section(
            section,
            name,
            sheets[name],
            inside=_inside(name, level, drawn[name]),
            extra="".join(extra.html for extra in extras[name]),
            level=level,
        )
        for name, section in named.items()
    ]
    return render_page(
        _title(page_sections),
        f"{len(runs)} run{'s' if len(runs) != 1 else ''}",
        _notes(left_out) + "".join(bodies),
        data,
        contents=_contents(page_sections),
        version=version,
    )


def render_page(
    title: str,
    subtitle: str,
    sections: str,
    data: Mapping[str, Any],
    *,
    contents: str = "",
    version: str = "",
) -> str:
    """Return a page with these sections (HTML) and the data of its script."""
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return Template(_asset("template.html")).substitute(
        policy=html.escape(_policy(script, watching=bool(version))),
        version=html.escape(version),
        title=html.escape(title),
        subtitle=html.escape(f"{subtitle} · created {now} with parsifl {parsifl.__version__}"),
        style=_asset("style.css"),
        contents=contents,
        sections=sections,
        data=_embedded(data),
        script=script,
    )


def _asset(name: str) -> str:
    return resources.files("parsifl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str, *, watching: bool) -> str:
    """Return a policy that allows only this script, whatever the page contains."""
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    connect = "'self'" if watching else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _embedded(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot close its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _title(page_sections: Sequence[Section]) -> str:
    labels = {group.label for section in page_sections for group in section.groups}
    named = list(dict.fromkeys(section.title for section in page_sections))
    what = next(iter(labels)) if len(labels) == 1 else f"{len(labels)} algorithms"
    where = named[0] if len(named) == 1 else f"{len(named)} datasets"
    return f"{what} on {where}"


def _contents(page_sections: Sequence[Section]) -> str:
    if len(page_sections) == 1:
        return ""
    items = "".join(
        f'<li><a href="#s{at}">{html.escape(_heading(section))}</a></li>'
        for at, section in enumerate(page_sections)
    )
    return f'<nav aria-label="Sections"><ul class="contents">{items}</ul></nav>'


def _heading(section: Section) -> str:
    better = "larger is better" if section.maximize else "smaller is better"
    return f"{section.title}: {section.score} ({better})"


def _sheets(section: Section, name: str) -> dict[str, Grid]:
    tables = {"headline": headline_sheet(section, f"{name}-results")}
    for at, sheet in enumerate(gain_sheets(section, f"{name}-gain")):
        tables[f"gain{at}"] = sheet
    tables["ledger"] = ledger_sheet(section, f"{name}-ledger")
    tables["cost"] = cost_sheet(section, f"{name}-cost")
    differing = difference_sheet(section, f"{name}-differences")
    return tables if differing is None else {**tables, "differences": differing}


def _section(
    section: Section,
    name: str,
    sheets: Mapping[str, Grid],
    *,
    inside: str,
    extra: str,
    level: int,
) -> str:
    gains = "".join(sheet.to_html() for key, sheet in sheets.items() if key.startswith("gain"))
    same = "<p>All runs have the same configuration, apart from seeds.</p>"
    return Template(_asset("section.html")).substitute(
        name=name,
        level=level,
        heading="" if level == 2 else f"<h2>{html.escape(_heading(section))}</h2>",
        notes=_notes([*section.notes, *undecided(section)]),
        headline=sheets["headline"].to_html(),
        extra=extra,
        gains=gains,
        inside=inside,
        ledger=sheets["ledger"].to_html(),
        cost=sheets["cost"].to_html(),
        differences=sheets["differences"].to_html() if "differences" in sheets else same,
        details="".join(_details(run) for run in section.runs),
    )


def _extras(section: Section, name: str, level: int) -> list[ExtraSection]:
    """Return what other folders and packages show about these runs."""
    make = [plugins.load(plugins.SECTIONS, key) for key in plugins.names(plugins.SECTIONS)]
    return [extra for each in make if (extra := each(section.runs, name, level)) is not None]


def _inside(name: str, level: int, drawn: Mapping[str, Any]) -> str:
    """Return the section on state sparsity, if some state is sparse or of low rank."""
    if not any(group["anatomy"] for group in drawn["groups"]):
        return ""
    return (
        f'<section class="block" aria-labelledby="{name}-h7">'
        f'<h{level} class="title" id="{name}-h7">Sparsity, rank and overlap</h{level}>'
        f'<figure data-figure="inside" data-section="{name}"></figure></section>'
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<aside class="warning" aria-label="Notes on the input"><ul>{items}</ul></aside>'


def _details(run: RunData) -> str:
    """Return the configuration and environment of a run in a collapsed element."""
    label = html.escape(f"{run.algorithm}, seed {run.seed}")
    where = html.escape(run.path.name)
    return (
        f"<details><summary>{label} <code>{where}</code></summary>"
        f'<div class="pair">{_listing("Configuration", flat(run.config))}'
        f"{_listing('Environment', flat(run.environment))}</div></details>"
    )


def _listing(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(str(value))}</td></tr>'
        for key, value in values.items()
    )
    return (
        f'<div class="scroll"><table class="listing"><caption>{title}</caption>{rows}</table></div>'
    )
