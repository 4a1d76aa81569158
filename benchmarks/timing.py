"""Ratios, never bare seconds: candidates take turns in one run, so that noise hits them alike.

Arguments of every benchmark: a name that ends in ``.json`` is where the figures go; all others
choose some of its parts.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import parsifl  # noqa: F401 - first: it tells OpenMP's threads to sleep while they wait


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate: median and quartiles over the turns."""

    name: str
    median: float
    low: float
    high: float


def chosen(known: Iterable[str]) -> list[str]:
    """Return the parts that the command line asks for: all of them if it names none."""
    parts = list(known)
    asked = [word for word in sys.argv[1:] if not word.endswith(".json")]
    if unknown := [word for word in asked if word not in parts]:
        sys.exit(f"there is no part {unknown[0]!r}; there are: {', '.join(parts)}")
    return asked or parts


def progress(text: str) -> None:
    """Say on standard error what is being measured."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def interleaved(candidates: Mapping[str, Callable[[], object]], turns: int) -> dict[str, Timing]:
    """Time every candidate `turns` times, one after the other, after one warm-up each."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    for _ in range(turns):
        for name, candidate in candidates.items():
            started = time.perf_counter()
            candidate()
            taken[name].append(time.perf_counter() - started)
    return {name: timing(name, seconds) for name, seconds in taken.items()}


def timing(name: str, seconds: list[float]) -> Timing:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return Timing(name, median, low, high)


def sgemm_peak(turns: int = 10, size: int = 1024) -> float:
    """Return the measured peak of dense float32 products in FLOP/s, at the current threads."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = min(interleaved({"gemm": lambda: left @ right}, turns).values(), key=lambda t: t.low)
    return 2 * size**3 / best.low


@dataclass(frozen=True)
class Row:
    """A line of a benchmark: a ratio, what it is measured against, and the mark to reach."""

    workload: str
    candidate: str
    milliseconds: float
    quartiles: tuple[float, float]
    ratio: float
    against: str


def row(workload: str, timing: Timing, reference: float, against: str) -> Row:
    """Return how many times faster than the reference a candidate is."""
    spread = (timing.low * 1e3, timing.high * 1e3)
    ratio = reference / timing.median
    return Row(workload, timing.name, timing.median * 1e3, spread, ratio, against)


def report(rows: list[Row]) -> None:
    """Print a table, and write JSON into the file that the command line names."""
    out = sys.stdout.write
    out(
        f"{'workload':38s} {'candidate':15s} {'ms':>9s} {'quartiles':>17s} {'times':>6s}  against\n"
    )
    for item in rows:
        low, high = item.quartiles
        out(
            f"{item.workload:38s} {item.candidate:15s} {item.milliseconds:9.1f} "
            f"{low:8.1f}-{high:8.1f} {item.ratio:6.2f}  {item.against}\n"
        )
    others = _OTHERS.cores()
    if others is not None:
        out(f"other programs used {others:.2f} cores meanwhile\n")
    for path in (word for word in sys.argv[1:] if word.endswith(".json")):
        found = {"torch": torch.__version__, "others": others, "rows": [asdict(r) for r in rows]}
        Path(path).write_text(json.dumps(found, indent=1))


class _Others:
    """How much of the processors other programs use: with more than a little, do not trust us."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy(), _own()

    def cores(self) -> float | None:
        """Return the mean since the start; None where the system does not tell."""
        busy = _busy()
        if busy is None or self._busy is None:
            return None
        passed = time.perf_counter() - self._started
        return max(0.0, (busy - self._busy - (_own() - self._own)) / passed)


def _busy() -> float | None:
    """Return the seconds that all processors have worked."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    except OSError:
        return None
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Return the seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_OTHERS = _Others()
