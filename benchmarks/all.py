"""Runs all benchmarks one after the other and keeps tables and figures in a folder.

``python benchmarks/all.py [FOLDER]``; the folder is build/bench if none is named. Ratios mean
something only while nothing else runs: every table ends with what other programs used meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(path: Path, place: Path) -> bool:
    """Run one benchmark; its table is shown when it is done, its progress meanwhile."""
    name = path.stem.removeprefix("bench_")
    sys.stdout.write(f"== {name}\n")
    sys.stdout.flush()
    started = time.perf_counter()
    figures = str(place / f"{name}.json")
    done = subprocess.run(
        [sys.executable, path, figures], stdout=subprocess.PIPE, text=True, check=False
    )
    (place / f"{name}.txt").write_text(done.stdout)
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{done.stdout}{name}: {seconds:.0f} s\n\n")
    return done.returncode == 0


def main() -> int:
    """Run everything; the exit code tells whether all came to an end with their marks reached."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "build" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    failed = [path.name for path in sorted(HERE.glob("bench_*.py")) if not run(path, place)]
    sys.stdout.write(f"tables and figures are in {place}\n")
    if failed:
        sys.stdout.write(f"not reached or not run: {', '.join(failed)}\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
