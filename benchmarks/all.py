"""Run all benchmarks in sequence and save tables and figures in a directory.

``python benchmarks/all.py [DIRECTORY]``; the default is build/bench. Ratios are meaningful only on
an idle machine: every table ends with the CPU time of other programs.
Idle threads are configured as by the command line, although the benchmarks import torch first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from parsifl.startup import WAITING

HERE = Path(__file__).resolve().parent


def run(path: Path, place: Path) -> list[str]:
    """Run one benchmark, showing its progress and then its table.

    Returns the missed targets, or a message if it failed.
    """
    name = path.stem.removeprefix("bench_")
    sys.stdout.write(f"== {name}\n")
    sys.stdout.flush()
    started, figures = time.perf_counter(), place / f"{name}.json"
    figures.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, path, str(figures)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**WAITING, **os.environ},
    )
    (place / f"{name}.txt").write_text(done.stdout)
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{done.stdout}{name}: {seconds:.0f} s\n\n")
    if not figures.exists():
        return [f"{name} failed (exit code {done.returncode})"]
    return [f"{name}: {text}" for text in json.loads(figures.read_text())["missed"]]


def main() -> int:
    """Run everything; the exit code is 1 if a target was missed or a benchmark failed."""
    words = sys.argv[1:]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        sys.exit(__doc__)
    place = Path(words[0]) if words else HERE.parent / "build" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    missed = [text for path in sorted(HERE.glob("bench_*.py")) for text in run(path, place)]
    minutes = (time.perf_counter() - started) / 60
    sys.stdout.write(f"{minutes:.1f} minutes; tables and figures are in {place}\n")
    for text in missed:
        sys.stdout.write(f"MISSED {text}\n")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
