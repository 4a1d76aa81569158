"""Ratios, never bare seconds: candidates take turns in one run, so that noise hits them alike."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
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
    return {name: _timing(name, seconds) for name, seconds in taken.items()}


def _timing(name: str, seconds: list[float]) -> Timing:
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
    """Print a table, and JSON into the file that the first argument names."""
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
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps([asdict(item) for item in rows], indent=1))
