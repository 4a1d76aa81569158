"""Build the wheel, install it with its extras into a new environment, and use it.

Usage: python tools/check_wheel.py DIRECTORY. It receives the wheel, the environment and the runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "flower-sim": "ray",
    "hdf5": "h5py",
    "images": "PIL",
    "metrics": "prometheus_client",
    "plots": "matplotlib",
    "rdata": "rdata",
    "sca": "cvxpy",
    "video": "av",
}
"""Each user extra of the wheel, with a module that it must provide."""
DITTO = ("run", "ditto", "--data", "digits", "--clients", "3", "--rounds", "2")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; on failure print both streams and exit."""
    # one thread each, as in Ray's workers, because bits depend on the number
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def build(folder: Path) -> Path:
    """Build the wheel and check what it contains."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("parsifl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    foreign = [name for name in names if not name.startswith("parsifl")]
    if foreign or "parsifl/py.typed" not in names:
        sys.exit(f"the wheel lacks py.typed or contains foreign files: {foreign[:5]}")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel and every extra; return its bin directory."""
    run(sys.executable, "-m", "venv", folder / "env")
    commands = folder / "env" / "bin"
    wanted = f"{wheel}[{','.join(EXTRAS)}]"
    constraints = ROOT / "constraints.txt"
    run(commands / "pip", "install", "--quiet", "--constraint", constraints, wanted)
    for extra, module in EXTRAS.items():
        run(commands / "python", "-c", f"import {module}")
        print(f"extra {extra}: imports {module}", flush=True)
    return commands


def scores(directory: Path) -> list[dict[str, object]]:
    """Return the recorded scores and bytes of a run, without timings."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    wanted = ("round", "bytes_up", "bytes_down", "personal")
    return [{key: json.loads(line).get(key) for key in wanted} for line in lines]


def use(commands: Path, folder: Path) -> None:
    """Run the demo, and one experiment in this process and on Flower's simulation with Ray."""
    parsifl = commands / "parsifl"
    run(parsifl, "list", "algorithms", cwd=folder)
    run(parsifl, "demo", "--out", "demo", cwd=folder)
    if not (folder / "demo" / "report.html").exists():
        sys.exit("parsifl demo has not written demo/report.html")
    print("demo: wrote its report", flush=True)
    run(parsifl, *DITTO, "--executor", "loop", "--out", "local", cwd=folder)
    run(parsifl, *DITTO, "--engine", "flower-sim", "--out", "ray", cwd=folder)
    if scores(folder / "local") != scores(folder / "ray"):
        sys.exit("Flower's simulation with Ray differs from the local loop: see local/ and ray/")
    print("flower-sim: the same personal scores and bytes as the local loop", flush=True)


def main(folder: Path) -> None:
    """Check the wheel from its build to a run on Ray."""
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    use(install(build(folder), folder), folder)
    print(f"wheel: {len(EXTRAS)} extras, demo and Ray in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
