from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.folders import make_run

from parsifl.engine.run_dir import read_runs
from parsifl.report.figures import MOST_POINTS, figures
from parsifl.report.groups import sections


def drawn(*folders: Path) -> dict[str, Any]:
    (section,) = sections(read_runs(folders))
    found = figures(section)
    json.dumps(found, allow_nan=False)
    return found


def test_curves_are_means_over_seeds_against_costs_so_far(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / str(seed), seed=seed)
    (group,) = drawn(tmp_path)["groups"]
    curves = group["curves"]
    assert curves["round"] == [1, 2, 3, 4]
    assert curves["x"]["up"] == [1000, 2000, 3000, 4000]
    assert curves["x"]["total"] == [3000, 6000, 9000, 12000]
    assert curves["x"]["seconds"] == [0.5, 1.0, 1.5, 2.0]
    scores = curves["y"]["personal|test|accuracy"]
    assert scores["mean"][-1] == pytest.approx(0.8455)
    assert scores["seeds"][-1] == pytest.approx(0.0005 * 2**0.5, rel=1e-4)
    assert scores["worst"][-1] == pytest.approx(0.8005)


def test_a_single_seed_has_no_spread_over_seeds(tmp_path: Path) -> None:
    (group,) = drawn(make_run(tmp_path))["groups"]
    assert group["curves"]["y"]["global|test|accuracy"]["seeds"] == [None] * 4


def test_curves_end_where_the_shortest_seed_does(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0, rounds=4)
    make_run(tmp_path / "b", seed=1, rounds=2)
    (group,) = drawn(tmp_path)["groups"]
    assert group["curves"]["round"] == [1, 2]


def test_what_is_not_finite_becomes_a_gap(tmp_path: Path) -> None:
    (group,) = drawn(make_run(tmp_path, level=float("nan")))["groups"]
    assert group["curves"]["y"]["global|test|accuracy"]["mean"] == [None] * 4


def test_long_runs_are_thinned_with_both_ends_kept(tmp_path: Path) -> None:
    (group,) = drawn(make_run(tmp_path, rounds=1001))["groups"]
    rounds = group["curves"]["round"]
    assert len(rounds) == MOST_POINTS
    assert (rounds[0], rounds[-1]) == (1, 1001)
    assert rounds == sorted(set(rounds))


def test_the_ledger_has_shares_of_dense_and_what_the_method_reports(tmp_path: Path) -> None:
    (group,) = drawn(make_run(tmp_path, evaluate=False))["groups"]
    ledger = group["ledger"]["y"]
    assert ledger["up, share of dense"] == [0.25] * 4
    assert ledger["bytes down per client"] == [400] * 4
    assert ledger["reported: density"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-5)
    assert ledger["up, over the entropy bound"] == [1.25] * 4
    assert ledger["seconds: aggregate"] == [0.125] * 4
    sent = {"up": 4000, "down": 8000, "dense_up": 16000, "dense_down": 8000}
    assert group["totals"] == {**sent, "entropy_up": 3200, "entropy_down": 8000}


def test_only_runs_on_the_same_rows_share_a_pair(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "local", seed=0)
    make_run(tmp_path / "b", "ditto", seed=0)
    make_run(tmp_path / "c", "ditto", seed=1)
    found = drawn(tmp_path)
    local, ditto = (group["clients"]["personal"] for group in found["groups"])
    assert found["baselines"] == ["local"]
    assert local[0]["pair"] == ditto[0]["pair"] != ditto[1]["pair"]
    assert local[0]["ids"] == list(range(10))
