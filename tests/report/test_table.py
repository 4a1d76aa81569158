from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from parsifl.report import formatting
from parsifl.report.table import Cell, Column, Grid, latex, mark_best, scored

COLUMNS = (Column("method", numeric=False), Column("accuracy, %", "accuracy"))


def grid(*cells: Cell, label: str = "a_b & <i>") -> Grid:
    rows = tuple((Cell(label), cell) for cell in cells)
    return Grid("results", "50 % <b>", COLUMNS, rows, ("note",))


def test_csv_has_full_precision_and_spreads_of_their_own() -> None:
    text = grid(Cell("33.3 ± 1.0", 1 / 3, 0.01), Cell(formatting.MISSING)).to_csv()
    header, first, second = csv.reader(io.StringIO(text))
    assert header == ["method", "accuracy", "accuracy (sd over seeds)"]
    assert float(first[1]) == 1 / 3
    assert first[2] == "0.01"
    assert second == ["a_b & <i>", "", ""]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0")))
def test_any_label_survives_csv_and_none_is_a_formula(label: str) -> None:
    _, row = csv.reader(io.StringIO(grid(Cell("1", 1.0), label=label).to_csv()))
    assert row[0] in (label, f"'{label}")
    assert row[0][:1] not in ("=", "+", "-", "@")


def test_latex_is_escaped_and_the_best_is_bold() -> None:
    text = grid(Cell("33.3 ± 1.0", 0.333, best=True)).to_latex()
    assert r"a\_b \& \textless{}i\textgreater{} & \textbf{33.3 $\pm$ 1.0} \\" in text
    assert r"\caption{50 \% \textless{}b\textgreater{}. note}" in text
    assert text.count("{table}") == 2
    assert r"\begin{tabular}{lr}" in text


@given(st.text())
def test_latex_leaves_no_active_character(text: str) -> None:
    escaped = latex(text)
    for known in (r"\textbackslash{}", r"\textasciitilde{}", r"\textasciicircum{}"):
        escaped = escaped.replace(known, "")
    for character in "&%$#_{}":
        escaped = escaped.replace(f"\\{character}", "")
    for known in (
        r"\textless{}",
        r"\textgreater{}",
        r"$\pm$",
        r"$\ge$",
        r"$\le$",
        r"$\times$",
        "$-$",
    ):
        escaped = escaped.replace(known, "")
    assert not set(escaped) & set("\\&%$#_{}~^<>\n")


def test_html_is_escaped_and_the_best_is_said_aloud() -> None:
    text = grid(Cell("1", 1.0, best=True, hint='"quoted"')).to_html()
    assert "<i>" not in text.replace("</i>", "")
    assert "a_b &amp; &lt;i&gt;" in text
    assert "50 % &lt;b&gt;" in text
    assert 'title="&quot;quoted&quot;"' in text
    assert "(best)" in text
    assert 'scope="row"' in text


def test_the_best_of_a_column_is_marked_with_its_ties() -> None:
    cells = [scored(value, None, "accuracy") for value in (0.90001, 0.90002, 0.5)]
    assert [cell.best for cell in mark_best(cells, True)] == [True, True, False]
    assert [cell.best for cell in mark_best(cells, False)] == [False, False, True]


def test_nothing_is_best_among_equals_or_alone() -> None:
    equal = [scored(0.50001, None, "accuracy"), scored(0.50002, 0.1, "accuracy")]
    assert not any(cell.best for cell in mark_best(equal, True))
    assert not any(
        cell.best for cell in mark_best([Cell("1", 1.0), Cell(formatting.MISSING)], True)
    )
