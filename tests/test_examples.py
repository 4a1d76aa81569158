"""Every example runs and prints what it promises; a notebook has the code of its script."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
import pytest
from tests.programs import Programs

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
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
import json
for cell in json.load(open({path!r}))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), {path!r}, "exec"))
"""
NOTEBOOKS = {"new_algorithm"}  # run as such: jupytext keeps the code of a script


def test_each_example_has_its_line() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_notebook_opens_with_a_title_and_has_cells_of_code(name: str) -> None:
    cells = jupytext.read(EXAMPLES / f"{name}.py").cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert sum(cell.cell_type == "code" for cell in cells) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs(name: str, tmp_path: Path, programs: Programs) -> None:
    if name in NEEDS_DATA and not os.environ.get("PARSIFL_DATA"):
        pytest.skip("needs real data: set PARSIFL_DATA to a folder that holds them")
    program = EXAMPLES / f"{name}.py"
    if name in NOTEBOOKS:
        made = tmp_path / f"{name}.ipynb"
        jupytext.write(jupytext.read(program), made)
        program = tmp_path / "kernel.py"
        program.write_text(CELLS.format(path=str(made)))
    done = programs.run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    if name in LEAVES:
        assert (tmp_path / LEAVES[name]).stat().st_size > 1_000
