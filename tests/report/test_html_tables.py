from __future__ import annotations

from pathlib import Path

from tests.report.folders import make_run

from parsifl.engine.run_dir import read_runs
from parsifl.report import formatting
from parsifl.report.groups import Section, sections
from parsifl.report.html_tables import (
    cost_sheet,
    difference_sheet,
    gain_sheets,
    headline_sheet,
    ledger_sheet,
)
from parsifl.report.table import Grid


def section(folder: Path) -> Section:
    (found,) = sections(read_runs([folder]))
    return found


def texts(grid: Grid, row: int = 0) -> dict[str, str]:
    titles = [column.title for column in grid.columns]
    return dict(zip(titles, (cell.text for cell in grid.rows[row]), strict=True))


def test_the_headline_shares_one_protocol_where_it_can(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "ditto", level=0.9)
    make_run(tmp_path / "b", "local", models=("personal",))
    grid = headline_sheet(section(tmp_path), "t")
    assert texts(grid)["personal accuracy, %"] == "94.5"
    assert texts(grid, 1)["global accuracy, %"] == formatting.MISSING
    assert [row[0].text for row in grid.rows] == ["ditto", "local"]
    assert [row[2].best for row in grid.rows] == [True, False]
    assert len([note for note in grid.notes if "last evaluated round" in note]) == 2


def test_runs_that_are_never_evaluated_have_no_columns_of_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", evaluate=False)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[run]\n", "[run]\nevaluate_every = 0\n"))
    grid = headline_sheet(section(tmp_path), "t")
    assert list(texts(grid)) == ["algorithm", "bytes up", "bytes down", "time", "rounds", "seeds"]
    assert not any("worst decile" in note for note in grid.notes)


def test_different_protocols_are_marked_row_by_row(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "ditto", rounds=4)
    make_run(tmp_path / "b", "fedavg", rounds=3)
    grid = headline_sheet(section(tmp_path), "t")
    assert [row[0].text for row in grid.rows] == ["ditto (1)", "fedavg (2)"]
    assert grid.notes[0].startswith("(1) Global:")
    assert "last evaluated round (4)" in grid.notes[0]
    assert "last evaluated round (3)" in grid.notes[1]


def test_a_run_that_goes_on_tells_how_far_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rounds=4)
    assert texts(headline_sheet(section(tmp_path), "t"))["rounds"] == "4"
    (run / "target.json").write_text('{"rounds": 60}')
    assert texts(headline_sheet(section(tmp_path), "t"))["rounds"] == "4 of 60"
    assert "a: 4 of 60 rounds are finished" in section(tmp_path).notes
    (run / "target.json").write_text('{"rounds": 4}')
    assert texts(headline_sheet(section(tmp_path), "t"))["rounds"] == "4"


def test_the_ledger_compares_with_dense(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    row = texts(ledger_sheet(section(tmp_path), "t"))
    assert row["up"] == "4.00 kB"
    assert row["up, share"] == "25.0 %"
    assert row["down, share"] == "100.0 %"
    assert row["up, bound"] == "3.20 kB"
    assert row["up, over bound"] == "+25.0 %"
    assert row["down, over bound"] == "+0.0 %"
    assert row["up per visit"] == "200 B"


def test_costs_add_up_and_mishaps_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    row = texts(cost_sheet(section(tmp_path), "t"))
    assert row["FLOPs"] == "40.0 k"
    assert row["local work"] == "1.00 s"
    assert row["aggregation"] == row["evaluation"] == "500 ms"
    assert row["simulated time"] == "2.00 s"
    assert row["dropped"] == "1"


def test_a_folder_that_only_began_has_tables_too(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=0)
    found = section(tmp_path)
    assert texts(headline_sheet(found, "t"))["personal accuracy, %"] == formatting.MISSING
    assert texts(ledger_sheet(found, "t"))["up per visit"] == formatting.MISSING
    assert texts(cost_sheet(found, "t"))["FLOPs"] == formatting.MISSING
    assert gain_sheets(found, "t") == []


def test_gains_are_signed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "local", level=0.7)
    make_run(tmp_path / "b", "fedavg", level=0.6)
    over_local, over_fedavg = gain_sheets(section(tmp_path), "t")
    assert over_local.caption == "Gain over local"
    assert texts(over_local)["gain, points"] == "\N{MINUS SIGN}10.0"
    assert texts(over_local)["clients worse"] == "100 %"
    assert texts(over_fedavg)["gain, points"] == "+10.0"
    assert texts(over_fedavg)["95 % interval"] == formatting.MISSING


def test_only_differing_fields_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", settings={"flag": True})
    assert difference_sheet(section(tmp_path), "t") is None
    make_run(tmp_path / "b", "fedprox", settings={"mu": 0.5})
    grid = difference_sheet(section(tmp_path), "t")
    assert grid is not None
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["algorithm.name", "fedavg", "fedprox"],
        ["algorithm.flag", "true", "not set"],
        ["algorithm.mu", "not set", "0.5"],
    ]
