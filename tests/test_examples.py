"""Every example runs from beginning to end, and its output says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LIMIT_SECONDS = 180
NEEDS_DATA = {"four_hospitals.py", "crime_by_state.py"}
SAYS = {
    "crime_by_state.py": "1994 communities in 46 states",
    "four_hospitals.py": "on its own patients",
    "new_algorithm.py": "FedShrink keeps every promise",
    "phones.py": "no plan is below",
}


def test_each_example_has_its_line() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs(name: str, tmp_path: Path) -> None:
    if name in NEEDS_DATA and not os.environ.get("PARSIFL_DATA"):
        pytest.skip("needs real data: set PARSIFL_DATA to a folder that holds them")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    if name == "new_algorithm.py":
        assert (tmp_path / "runs/new-algorithm/report.html").stat().st_size > 10_000
