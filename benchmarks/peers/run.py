"""W1 and W3 compared with other simulators, each in its own environment.

Environments are created once under build/peers (or the directory in BENCH_PEERS), with the torch
of constraints.txt. All simulators alternate, with one thread and with two, and the better of both
counts. Start-up (imports, data, the first round) is shown but not counted. A peer that cannot be
installed or does not run is reported with the reason.
``python benchmarks/peers/run.py [FILE.json] [PEER ...] [WORKLOAD ...]``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = Path(os.environ.get("BENCH_PEERS", ROOT / "build" / "peers"))
PEERS = {
    "pfl": "pfl[pytorch]==0.6.0",
    "fluke": "fluke-fl==0.8.1",
    "flower": "flwr[simulation]==1.41.0",
}
GOALS = {
    "W1": {"plain": 5.0, "pfl": 6.0, "fluke": 6.0, "flower": 25.0},
    "W3": {"plain": 1.4, "pfl": 1.0},
}
"""Target speedup of Parsifl, by workload."""
THREADS = (1, 2)
TURNS = int(os.environ.get("BENCH_TURNS", "2"))
LONGEST = 240.0


@dataclass(frozen=True)
class Row:
    """One simulator: the time of a round, its start-up time, and the speedup of Parsifl."""

    workload: str
    name: str
    milliseconds: float | None
    quartiles: tuple[float, float] | None
    threads: int | None
    startup: float | None
    ours_is_faster: float | None
    goal: float | None
    problem: str = ""


def pinned() -> str:
    """Return the line of constraints.txt that selects the CPU build of torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(name: str, package: str) -> Path:
    """Return the Python of a peer's environment; RuntimeError if it cannot be created."""
    place = PLACE / name
    python = place / "bin" / "python"
    done_already = place / "installed"
    if done_already.exists() and done_already.read_text() == package:
        return python
    _say(f"{package} is being installed in {place}")
    venv.create(place, with_pip=True, clear=True)
    constraint = place / "constraints.txt"
    constraint.write_text(pinned() + "\n")
    words = ["-m", "pip", "install", "--quiet", "--constraint", str(constraint), package, "torch"]
    done = subprocess.run([python, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip cannot install {package}: {_last(done.stderr)}")
    done_already.write_text(package)
    return python


def _say(text: str) -> None:
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it said nothing"


def once(workload: str, name: str, python: Path, threads: int) -> dict[str, Any]:
    """Run one simulator; RuntimeError with the reason if it fails."""
    started = time.time()
    settings = {"OMP_NUM_THREADS": str(threads), "BENCH_WORKLOAD": workload}
    try:
        done = subprocess.run(
            [python, HERE / f"with_{name}.py"],
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
            cwd=HERE,
            env={**os.environ, **settings},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it takes more than {LONGEST:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            found["startup"] = found["first"] - started  # the interpreter's own included
            return found
    raise RuntimeError(_last(done.stderr or done.stdout))


def measure(
    workload: str, pythons: dict[str, Path]
) -> tuple[dict[str, dict[int, list[Any]]], dict[str, str]]:
    """Run all simulators alternately; return the results, and why some did not run."""
    found: dict[str, dict[int, list[Any]]] = {name: {} for name in pythons}
    failed: dict[str, str] = {}
    for turn in range(TURNS):
        for threads in THREADS:
            for name, python in pythons.items():
                # Flower's workers have one thread each, independent of the server
                if name in failed or (name == "flower" and threads != THREADS[0]):
                    continue
                try:
                    run = once(workload, name, python, threads)
                except RuntimeError as error:
                    failed[name] = str(error)
                    continue
                found[name].setdefault(threads, []).append(run)
                said = f"{workload}, turn {turn + 1}, {name}, threads {threads}"
                _say(f"{said}: {1e3 * run['median']:.1f} ms")
    return found, failed


def rows(
    workload: str, found: dict[str, dict[int, list[Any]]], failed: dict[str, str]
) -> list[Row]:
    """Compare all simulators, at the better number of threads, with Parsifl."""
    best: dict[str, tuple[int, list[float], float]] = {}
    for name, by_threads in found.items():
        if name not in failed and by_threads:
            pooled = {
                t: [s for run in runs for s in run["rounds"]] for t, runs in by_threads.items()
            }
            threads = min(pooled, key=lambda t: statistics.median(pooled[t]))
            startup = statistics.median(run["startup"] for run in by_threads[threads])
            best[name] = threads, pooled[threads], startup
    ours = statistics.median(best["parsifl"][1]) if "parsifl" in best else None
    table = []
    for name in (*found, *(n for n in failed if n not in found)):
        goal = GOALS[workload].get(name)
        if name not in best:
            table.append(Row(workload, name, None, None, None, None, None, goal, failed[name]))
            continue
        threads, seconds, startup = best[name]
        low, median, high = (1e3 * s for s in statistics.quantiles(seconds, n=4))
        ratio = None if ours is None else median / 1e3 / ours
        table.append(Row(workload, name, median, (low, high), threads, startup, ratio, goal))
    return table


def show(table: list[Row]) -> None:
    """Print the table."""
    out = sys.stdout.write
    out(f"{'':13s} {'ms/round':>10s} {'quartiles':>17s} {'threads':>7s} {'start-up s':>10s} "
        f"{'our speedup':>15s} {'goal':>5s}\n")  # fmt: skip
    for row in table:
        if row.milliseconds is None or row.quartiles is None:
            out(f"{row.workload} {row.name:10s} not measured: {row.problem}\n")
            continue
        low, high = row.quartiles
        goal = "" if row.goal is None else f"{row.goal:g}"
        out(f"{row.workload} {row.name:10s} {row.milliseconds:10.1f} {low:8.1f}-{high:8.1f} "
            f"{row.threads:7d} {row.startup:10.1f} {row.ours_is_faster or 0:15.2f} "
            f"{goal:>5s}\n")  # fmt: skip


def main() -> None:
    """Install, measure, print."""
    words = sys.argv[1:]
    asked = [word for word in words if word in PEERS] or list(PEERS)
    workloads = [word for word in words if word in GOALS] or list(GOALS)
    known = {*PEERS, *GOALS}
    if unknown := [word for word in words if word not in known and not word.endswith(".json")]:
        sys.exit(f"unknown argument {unknown[0]!r}; known: {', '.join(sorted(known))}")
    pythons = {"plain": Path(sys.executable), "parsifl": Path(sys.executable)}
    failed: dict[str, str] = {}
    for name in asked:
        try:
            pythons[name] = install(name, PEERS[name])
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            failed[name] = str(error)
    table: list[Row] = []
    for workload in workloads:
        found, broken = measure(workload, pythons)
        table += rows(workload, found, {**failed, **broken})
    show(table)
    for path in (word for word in words if word.endswith(".json")):
        Path(path).write_text(json.dumps([asdict(row) for row in table], indent=1))


if __name__ == "__main__":
    main()
