from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parsifl.core.errors import ConfigError
from parsifl.masks import compare, draw, optimal, rows_of


def test_draw_shows_each_mask_once() -> None:
    plan = optimal([928, 2528, 9152], [928.0] * 15 + [12608.0] * 5)
    lines = draw(plan).splitlines()
    assert lines == [
        "layers         012",
        "devices 0-14   #..",
        "devices 15-19  ###",
        "tenths         922",
    ]
    assert "more masks" in draw(plan, most_rows=1)


def test_devices_that_are_not_in_a_row_are_counted() -> None:
    assert "2 devices, 0 first" in draw(optimal([1, 2], [1, 3, 1]))


def test_comparison_is_plain_data_with_the_optimum_first() -> None:
    plan = optimal([5, 4, 3], [7, 5, 12])
    rows = compare(plan, draws=50)
    names = ["optimal", "sequential", "random", "best of 50 random"]
    assert [row["design"] for row in rows] == names
    feasible = [row["J"] for row in rows if row.get("problem") is None]
    assert rows[0]["J"] == min(feasible)
    json.dumps(rows)


def test_comparison_says_when_no_random_design_is_feasible() -> None:
    plan = optimal([5, 5], [6])
    assert compare(plan, draws=5)[0]["problem"] is None


def test_rows_and_plan_are_json() -> None:
    plan = optimal({"a": 1, "b": 2}, [1, 3, 1])
    assert rows_of(plan)[0] == {"devices": [0, 2], "layers": ["a"], "parameters": 1}
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["masks"] == [[1, 0], [1, 1], [1, 0]]
    assert data["proven"] is True
    assert data["layers"] == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="device 7 is not in the plan"):
        plan.trained(7)


def test_solver_does_not_import_torch() -> None:
    code = "import sys, parsifl.masks as m; m.optimal([1], [1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
