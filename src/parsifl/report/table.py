"""A table that is shown in HTML and exported as CSV or LaTeX."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parsifl.report import formatting

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{EN DASH}": "--",
    "\N{MINUS SIGN}": "$-$",
    "\n": " ",
}


@dataclass(frozen=True)
class Cell:
    """A displayed text and its number; `best` marks the best of its column."""

    text: str
    value: float | None = None
    spread: float | None = None
    best: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """A heading; `raw` names the column in a CSV file, where values have base units."""

    title: str
    raw: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Grid:
    """A table with a caption and notes; the first cell of each row is its heading."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def to_csv(self) -> str:
        """Return full-precision numbers, with spreads in separate columns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        spread = [any(row[at].spread is not None for row in self.rows) for at in self._positions]
        header: list[str] = []
        for column, with_spread in zip(self.columns, spread, strict=True):
            name = column.raw or column.title
            header += [name, f"{name} (sd over seeds)"] if with_spread else [name]
        writer.writerow(header)
        for row in self.rows:
            cells: list[str] = []
            for cell, column, with_spread in zip(row, self.columns, spread, strict=True):
                value = "" if cell.value is None else repr(cell.value)
                cells.append(value if column.numeric else _harmless(cell.text))
                if with_spread:
                    cells.append("" if cell.spread is None else repr(cell.spread))
            writer.writerow(cells)
        return out.getvalue()

    def to_latex(self) -> str:
        """Return a booktabs table; the best of a column is bold."""
        align = "".join("r" if column.numeric else "l" for column in self.columns)
        lines = [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex(' '.join([self.caption + '.', *self.notes]))}}}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(latex(column.title) for column in self.columns) + r" \\",
            r"\midrule",
        ]
        for row in self.rows:
            cells = [latex(cell.text) for cell in row]
            bold = [rf"\textbf{{{t}}}" if c.best else t for t, c in zip(cells, row, strict=True)]
            lines.append(" & ".join(bold) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def to_html(self) -> str:
        """Return a table with row and column headings, in a keyboard-scrollable region."""
        name = html.escape(self.name)
        head = "".join(_head(column) for column in self.columns)
        body = "".join(self._html_row(at) for at in range(len(self.rows)))
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = html.escape(self.caption)
        return (
            f'<div class="table" data-table="{name}">'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
            f'<div class="under"><div class="notes">{notes}</div>{_BUTTONS}</div></div>'
        )

    def _html_row(self, at: int) -> str:
        first, *rest = self.rows[at]
        cells = [f'<th scope="row">{html.escape(first.text)}</th>']
        for cell, column in zip(rest, self.columns[1:], strict=True):
            kind = " ".join(["num"] * column.numeric + ["best"] * cell.best)
            hint = f' title="{html.escape(cell.hint)}"' if cell.hint else ""
            value = "" if cell.value is None else f' data-value="{cell.value!r}"'
            mark = '<span class="sr"> (best)</span>' if cell.best else ""
            cells.append(f'<td class="{kind}"{hint}{value}>{html.escape(cell.text)}{mark}</td>')
        return f'<tr data-row="{at}">{"".join(cells)}</tr>'

    @property
    def _positions(self) -> range:
        return range(len(self.columns))


_BUTTONS = (
    '<div class="buttons" role="group" aria-label="Export this table">'
    + "".join(
        f'<button type="button" data-export="{kind}-{act}">{text}</button>'
        for kind, act, text in (
            ("csv", "copy", "Copy CSV"),
            ("csv", "save", "Save CSV"),
            ("latex", "copy", "Copy LaTeX"),
            ("latex", "save", "Save LaTeX"),
        )
    )
    + "</div>"
)


def _head(column: Column) -> str:
    kind = ' class="num"' if column.numeric else ""
    return f'<th scope="col"{kind}>{html.escape(column.title)}</th>'


def latex(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> latex("a_b: 97.1 ± 0.3 %")
    'a\\_b: 97.1 $\\pm$ 0.3 \\%'
    """
    return "".join(_LATEX.get(character, character) for character in text)


def _harmless(text: str) -> str:
    # a spreadsheet would evaluate a cell that starts like a formula
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def mark_best(cells: Sequence[Cell], maximize: bool) -> Iterator[Cell]:
    """Mark the best of a column: only if there is more than one number and they differ."""
    # values that are displayed as equal count as equal
    shown = {cell.text.split(" ±")[0] for cell in cells if cell.value is not None}
    if len(shown) < 2:
        yield from cells
        return
    values = [cell.value for cell in cells if cell.value is not None]
    top = max(values) if maximize else min(values)
    best = {cell.text.split(" ±")[0] for cell in cells if cell.value == top}
    for cell in cells:
        yield replace(cell, best=cell.text.split(" ±")[0] in best)


def scored(value: float, spread: float | None, name: str) -> Cell:
    """Return the cell of a score; an accuracy is in per cent."""
    text = formatting.score(value, name, unit=False)
    if spread is not None:
        text += f" ± {formatting.score(spread, name, unit=False)}"
    return Cell(text, value, spread)


@dataclass(frozen=True)
class ExtraSection:
    """A section of the page that another folder adds (group `parsifl.sections` of `core.plugins`).

    Attributes
    ----------
    tables
        The tables that can be exported from the page.
    html
        The section, with the tables.
    """

    tables: Sequence[Grid]
    html: str
