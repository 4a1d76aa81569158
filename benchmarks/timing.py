"""Ratios instead of seconds: candidates alternate in one run, so noise affects them equally.

Every line shows the speedup of a candidate over a reference, and the share of a bound that it
reaches: the time of its products at the peak of `sgemm`, or of its reads and writes at the speed of
a large copy; both are measured in the same run, at the better number of threads. Arguments of every
benchmark: a name that ends in ``.json`` is the output file of the figures; all others select parts.
The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

import parsifl  # noqa: F401 - first: it tells OpenMP's threads to sleep while they wait

THREADS = (1, 2)
LEGEND = """times: speedup over `against`, by medians (above 1 is faster)
target: the smallest speedup required; MISSED names what was not reached
of the bound: the shortest possible time as a share of the median (sgemm: all operations at the
speed of a large product; memory: all reads and writes at the speed of a large copy)
"""
MEASURED: dict[str, float] = {}
"""Peak rates measured in this run: FLOP/s of "sgemm", bytes/s of "memory"."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate: median and quartiles over the turns."""

    name: str
    median: float
    low: float
    high: float


def chosen(known: Iterable[str], besides: Iterable[str] = ()) -> list[str]:
    """Return the parts that the command line selects; all of them if it names none.

    `besides` may be named too.
    """
    parts, more = list(known), list(besides)
    asked = [word for word in sys.argv[1:] if not word.endswith(".json")]
    if unknown := [word for word in asked if word not in parts + more]:
        sys.exit(f"unknown part {unknown[0]!r}; known: {', '.join(parts + more)}")
    return asked or parts


def progress(text: str) -> None:
    """Print on standard error what is being measured."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def interleaved(
    candidates: Mapping[str, Callable[[], object]], turns: int, *, warm: bool = False
) -> dict[str, Timing]:
    """Time every candidate `turns` times, alternately.

    An additional first turn does not count, unless all candidates are `warm` already.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in () if warm else candidates.values():
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


@dataclass(frozen=True)
class Bound:
    """The shortest possible time in seconds, and what limits it."""

    seconds: float
    by: Literal["sgemm", "memory"]

    def times(self, factor: float) -> Bound:
        """Return the bound of a multiple of the work."""
        return Bound(self.seconds * factor, self.by)


def products(flops: float) -> Bound:
    """Return the time of dense float32 products at their measured peak."""
    size = 1024
    left, right = torch.randn(size, size), torch.randn(size, size)
    return Bound(flops / _peak("sgemm", lambda: left @ right, 2.0 * size**3), "sgemm")


def moved(size: float) -> Bound:
    """Return the time of reading and writing this many bytes at the speed of a large copy."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    peak = _peak("memory", lambda: target.copy_(source), 2.0 * source.nbytes)
    return Bound(size / peak, "memory")


def longer(*bounds: Bound) -> Bound:
    """Return the largest of several bounds."""
    return max(bounds, key=lambda bound: bound.seconds)


def _peak(name: str, work: Callable[[], object], amount: float) -> float:
    """Return the highest rate measured in this run, at any number of threads."""
    before, best = torch.get_num_threads(), MEASURED.get(name, 0.0)
    for threads in THREADS * 3:  # one disturbed measurement would understate the peak
        torch.set_num_threads(threads)
        best = max(best, amount / interleaved({name: work}, 6)[name].low)
    torch.set_num_threads(before)
    MEASURED[name] = best
    return best


@dataclass(frozen=True)
class Mark:
    """A target, and whether it was reached."""

    text: str
    reached: bool


def at_least(asked: float, found: float, what: str) -> Mark:
    """Return the target of a figure that should be large."""
    return Mark(f"{found:.3g} {what}, target: at least {asked:g}", bool(found >= asked))


def at_most(asked: float, found: float, what: str) -> Mark:
    """Return the target of a figure that should be small."""
    return Mark(f"{found:.3g} {what}, target: at most {asked:g}", bool(found <= asked))


@dataclass(frozen=True)
class Row:
    """A line: the speedup over a reference, the share of a bound, and a note."""

    workload: str
    candidate: str
    milliseconds: float
    quartiles: tuple[float, float]
    ratio: float
    against: str
    bound: float | None
    bound_by: str
    note: str
    asked: float | None = None
    marks: tuple[Mark, ...] = ()

    def missed(self) -> list[str]:
        """Return the targets that were not reached."""
        return [mark.text for mark in self.marks if not mark.reached]


def marked(item: Row, times: float | None = None, *marks: Mark) -> Row:
    """Return the line with a target speedup and other targets."""
    own = () if times is None else (at_least(times, item.ratio, f"times {item.against}"),)
    return replace(item, asked=times, marks=(*own, *marks))


def row(
    workload: str,
    timing: Timing,
    reference: float,
    against: str,
    bound: Bound | None = None,
    note: str = "",
) -> Row:
    """Return the speedup of a candidate over the reference, and its share of the bound."""
    return Row(
        workload=workload,
        candidate=timing.name,
        milliseconds=timing.median * 1e3,
        quartiles=(timing.low * 1e3, timing.high * 1e3),
        ratio=reference / timing.median,
        against=against,
        bound=None if bound is None else bound.seconds / timing.median,
        bound_by="" if bound is None else bound.by,
        note=note,
    )


def report(rows: list[Row], about: str | None) -> int:
    """Print a description and a table, write JSON if requested, and return the exit code.

    The exit code is 1 if a target was missed.
    """
    out = sys.stdout.write
    out(f"{(about or '').strip()}\n\n")
    out(
        f"{'workload':38s} {'candidate':22s} {'ms':>8s} {'quartiles':>17s} {'times':>6s}  "
        f"{'against':22s} {'target':>6s} {'of the bound':>12s}\n"
    )
    for item in rows:
        out(f"{_line(item).rstrip()}\n")
    others = _OTHERS.cores()
    missed = [f"{i.workload}, {i.candidate}: {text}" for i in rows for text in i.missed()]
    _foot(others, missed, sum(len(item.marks) for item in rows))
    found = {
        "torch": torch.__version__,
        "others": others,
        "machine": MEASURED,
        "missed": missed,
        "rows": [asdict(r) for r in rows],
    }
    for path in (word for word in sys.argv[1:] if word.endswith(".json")):
        Path(path).write_text(json.dumps(found, indent=1))
    return int(bool(missed))


def _line(item: Row) -> str:
    low, high = map(_digits, item.quartiles)
    share = "" if item.bound is None else f"{100 * item.bound:.0f} % {item.bound_by}"
    asked = "" if item.asked is None else f"{item.asked:g}"
    notes = [item.note, *(f"MISSED {text}" for text in item.missed())]
    return (
        f"{item.workload:38s} {item.candidate:22s} {_digits(item.milliseconds):>8s} "
        f"{f'{low} - {high}':>17s} {item.ratio:6.2f}  {item.against:22s} {asked:>6s} "
        f"{share:>12s}  {'; '.join(note for note in notes if note)}"
    )


def _digits(value: float) -> str:
    """Return a time with three significant digits."""
    whole = len(str(int(value))) if value >= 1 else 0
    return f"{value:.{max(3 - whole, 0)}f}"


def _foot(others: float | None, missed: list[str], asked: int) -> None:
    out = sys.stdout.write
    out(LEGEND)
    units = {"sgemm": "GFLOP/s of dense products", "memory": "GB/s of a copy, read and written"}
    said = [f"{speed / 1e9:.0f} {units[name]}" for name, speed in MEASURED.items()]
    if said:
        out(f"the machine, in this run: {', '.join(said)}\n")
    if others is not None:
        out(f"other programs used {others:.2f} cores meanwhile\n")
    if asked:
        out(f"targets: {asked - len(missed)} of {asked} reached\n")
    for text in missed:
        out(f"MISSED {text}\n")


class _Others:
    """CPU use of other programs; figures are unreliable if it is not small."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy(), _own()

    def cores(self) -> float | None:
        """Return the mean since the start; None if the system does not provide it."""
        busy = _busy()
        if busy is None or self._busy is None:
            return None
        passed = time.perf_counter() - self._started
        return max(0.0, (busy - self._busy - (_own() - self._own)) / passed)


def _busy() -> float | None:
    """Return the busy seconds of all processors."""
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
