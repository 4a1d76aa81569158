"""Every example runs and prints what it promises; a notebook has the code of its script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LIMIT_SECONDS = 180
NEEDS_DATA = {"four_hospitals", "crime_by_state"}
SAYS = {
    "crime_by_state": "1994 communities in 46 states",
    "four_hospitals": "on its own patients",
    "new_algorithm": "FedTop passes every check",
    "phones": "no plan is below",
    "video_frame": "with the frame in sight",
}
LEAVES = {"new_algorithm": "runs/new-algorithm/report.html", "video_frame": "frame.png"}
# what a kernel does: one cell after the other, in one module
CELLS = """
import jupytext, sys
for cell in jupytext.read(sys.argv[1]).cells:
    if cell.cell_type == "code":
        exec(compile(cell.source, sys.argv[1], "exec"))
"""


def test_each_example_has_its_line() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_notebook_opens_with_a_title_and_has_cells_of_code(name: str) -> None:
    cells = jupytext.read(EXAMPLES / f"{name}.py").cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert sum(cell.cell_type == "code" for cell in cells) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "script") for name in sorted(SAYS)), ("new_algorithm", "notebook")]
)
def test_example_runs(name: str, kind: str, tmp_path: Path) -> None:
    if name in NEEDS_DATA and not os.environ.get("PARSIFL_DATA"):
        pytest.skip("needs real data: set PARSIFL_DATA to a folder that holds them")
    script = EXAMPLES / f"{name}.py"
    command = [str(script)]
    if kind == "notebook":
        made = tmp_path / f"{name}.ipynb"
        jupytext.write(jupytext.read(script), made)
        command = ["-c", CELLS, str(made)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    if name in LEAVES:
        assert (tmp_path / LEAVES[name]).stat().st_size > 1_000
