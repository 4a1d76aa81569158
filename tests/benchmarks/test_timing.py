"""What the benchmarks report: a ratio, a share of a bound, a median with its spread."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


timing = _load(FOLDER / "timing.py")
everything = _load(FOLDER / "all.py")
peers = _load(FOLDER / "peers" / "run.py")


def test_candidates_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    found = timing.interleaved({name: lambda n=name: calls.append(n) for name in "ab"}, 3)
    assert calls == ["a", "b"] * 4
    timing.interleaved({"c": lambda: calls.append("c")}, 2, warm=True)
    assert calls[8:] == ["c", "c"]
    assert 0 < found["a"].low <= found["a"].median <= found["a"].high


def test_a_row_is_a_ratio_and_a_share_of_the_bound() -> None:
    taken = timing.Timing("ours", median=0.2, low=0.1, high=0.3)
    found = timing.row("w", taken, 1.0, "plain", timing.Bound(0.05, "sgemm").times(2))
    assert found.ratio == pytest.approx(5.0)
    assert found.bound == pytest.approx(0.5)
    assert found.bound_by == "sgemm"
    assert found.quartiles == pytest.approx((100.0, 300.0))
    assert timing.row("w", taken, 1.0, "plain").bound is None


def test_bounds_are_measured_here_and_the_longer_one_counts() -> None:
    threads = torch.get_num_threads()
    products, moved = timing.products(1e9), timing.moved(1e9)
    assert torch.get_num_threads() == threads
    assert set(timing.MEASURED) == {"sgemm", "memory"}
    assert 1e9 < 1e9 / products.seconds < 1e14
    assert 1e8 < 1e9 / moved.seconds < 1e13
    assert timing.longer(products, moved.times(1e6)).by == "memory"
    timing.MEASURED["sgemm"] = 1e18  # once seen, a peak counts until the end of the run
    assert timing.products(1e9).seconds == 1e-9


def test_a_report_is_a_table_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench", str(path), "some"])
    taken = timing.Timing("ours", 0.2, 0.1, 0.3)
    line = timing.row("W1", taken, 1.0, "plain", timing.Bound(0.05, "memory"), "a note")
    assert timing.report([timing.marked(line, 4.0)], "What it is about.") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "What it is about."
    assert " ".join(said[3].split()) == "W1 ours 200 100 - 300 5.00 plain 4 25 % memory a note"
    assert "targets: 1 of 1 reached" in said
    row = json.loads(path.read_text())["rows"][0]
    assert (row["ratio"], row["bound"], row["bound_by"]) == (5.0, 0.25, "memory")
    assert timing.chosen(["some", "other"]) == timing.chosen(["other"], ["some"]) == ["some"]
    with pytest.raises(SystemExit, match="unknown part 'some'"):
        timing.chosen(["other"])


def test_a_missed_mark_is_told_and_gives_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench", str(path)])
    line = timing.row("W1", timing.Timing("ours", 0.2, 0.1, 0.3), 1.0, "plain")
    few, memory = timing.marked(line, 6.0), timing.at_most(2, 1.5, "GB")
    assert timing.report([line, few, timing.marked(line, None, memory)], None) == 1
    missed = "W1, ours: 5 times plain, target: at least 6"
    said = capsys.readouterr().out
    assert f"MISSED {missed}\n" in said
    assert "targets: 1 of 2 reached" in said
    (told,) = [text for text in said.splitlines() if text.startswith("W1") and "MISSED" in text]
    assert " ".join(told.split()).endswith("plain 6 MISSED 5 times plain, target: at least 6")
    assert json.loads(path.read_text())["missed"] == [missed]


@pytest.mark.parametrize(
    ("code", "missed"),
    [
        ("Path(sys.argv[1]).write_text('{\"missed\": []}')", []),
        ('Path(sys.argv[1]).write_text(\'{"missed": ["far"]}\'); sys.exit(1)', ["x: far"]),
        ("sys.exit(2)", ["x failed (exit code 2)"]),
    ],
)
def test_what_all_benchmarks_missed_is_gathered(
    tmp_path: Path, code: str, missed: list[str]
) -> None:
    path = tmp_path / "bench_x.py"
    path.write_text(f"import sys\nfrom pathlib import Path\n{code}\n")
    assert everything.run(path, tmp_path) == missed


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.012"), (1.2345, "1.23"), (45.67, "45.7"), (456.7, "457"), (45678.9, "45679")],
)
def test_times_have_three_digits_that_count(value: float, text: str) -> None:
    assert timing._digits(value) == text


def test_peers_are_compared_at_their_better_number_of_threads() -> None:
    def runs(*seconds: float) -> list[dict[str, Any]]:
        return [{"rounds": list(seconds), "startup": 3.0}]

    found = {
        "parsifl": {1: runs(0.02, 0.02), 2: runs(0.01, 0.01)},
        "pfl": {1: runs(0.1, 0.1), 2: runs(0.3, 0.3)},
    }
    ours, pfl, gone = peers.rows("W1", found, {"fluke": "it does not start"})
    assert (ours.threads, pfl.threads) == (2, 1)
    assert pfl.ours_is_faster == pytest.approx(10.0)
    assert (pfl.goal, gone.problem) == (6.0, "it does not start")
    assert peers.rows("W3", found, {})[1].goal == 1.0
