"""Ratios, never bare seconds: candidates take turns in one run, so that noise hits them alike.

Every line tells how many times faster than the plain way a candidate is, and what share of a bound
it reaches: the time that its products take at the peak of `sgemm`, or what it must read and write
takes at the speed of a large copy; both are measured in the same run, at the better number of
threads. Arguments of every benchmark: a name that ends in ``.json`` is where the figures go; all
others choose some of its parts. The exit code is 1 where something that is asked for is missed.
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
LEGEND = """times: so many times as fast as what `against` names, by the medians (above 1 is faster)
asked: the least of these times that is asked for; MISSED says what was not reached
of the bound: what the machine needs at least, as a share of the median (sgemm: its operations at
the speed of a large product; memory: what it reads and writes at the speed of a large copy)
"""
MEASURED: dict[str, float] = {}
"""The best of the machine that was seen in this run: FLOP/s of "sgemm", bytes/s of "memory"."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate: median and quartiles over the turns."""

    name: str
    median: float
    low: float
    high: float


def chosen(known: Iterable[str], besides: Iterable[str] = ()) -> list[str]:
    """Return the parts that the command line asks for: all of them if it names none.

    `besides` may be named too.
    """
    parts, more = list(known), list(besides)
    asked = [word for word in sys.argv[1:] if not word.endswith(".json")]
    if unknown := [word for word in asked if word not in parts + more]:
        sys.exit(f"there is no part {unknown[0]!r}; there are: {', '.join(parts + more)}")
    return asked or parts


def progress(text: str) -> None:
    """Say on standard error what is being measured."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def interleaved(
    candidates: Mapping[str, Callable[[], object]], turns: int, *, warm: bool = False
) -> dict[str, Timing]:
    """Time every candidate `turns` times, one after the other.

    There is one turn more that does not count, unless all of them are `warm` already.
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
    """The least seconds that the machine allows, and what limits it."""

    seconds: float
    by: Literal["sgemm", "memory"]

    def times(self, factor: float) -> Bound:
        """Return the bound of so much more work."""
        return Bound(self.seconds * factor, self.by)


def products(flops: float) -> Bound:
    """Return the time of dense float32 products at their measured peak."""
    size = 1024
    left, right = torch.randn(size, size), torch.randn(size, size)
    return Bound(flops / _peak("sgemm", lambda: left @ right, 2.0 * size**3), "sgemm")


def moved(size: float) -> Bound:
    """Return the time of reading and writing so many bytes as fast as a large copy does."""
    source = torch.randn(1 << 24)
    target = torch.empty_like(source)
    peak = _peak("memory", lambda: target.copy_(source), 2.0 * source.nbytes)
    return Bound(size / peak, "memory")


def longer(*bounds: Bound) -> Bound:
    """Return the bound that says more: whatever has to keep all keeps the longest."""
    return max(bounds, key=lambda bound: bound.seconds)


def _peak(name: str, work: Callable[[], object], amount: float) -> float:
    """Return the largest amount a second that was seen in this run, at any number of threads."""
    before, best = torch.get_num_threads(), MEASURED.get(name, 0.0)
    for threads in THREADS * 3:  # one disturbed moment would make the bound look near
        torch.set_num_threads(threads)
        best = max(best, amount / interleaved({name: work}, 6)[name].low)
    torch.set_num_threads(before)
    MEASURED[name] = best
    return best


@dataclass(frozen=True)
class Mark:
    """What is asked for, and whether it was found."""

    text: str
    reached: bool


def at_least(asked: float, found: float, what: str) -> Mark:
    """Return the mark of a figure that is to be large."""
    return Mark(f"{found:.3g} {what}, asked: at least {asked:g}", bool(found >= asked))


def at_most(asked: float, found: float, what: str) -> Mark:
    """Return the mark of a figure that is to be small."""
    return Mark(f"{found:.3g} {what}, asked: at most {asked:g}", bool(found <= asked))


@dataclass(frozen=True)
class Row:
    """A line: how many times faster than what, the share of which bound, and what else to know."""

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
        """Return the marks that were not reached."""
        return [mark.text for mark in self.marks if not mark.reached]


def marked(item: Row, times: float | None = None, *marks: Mark) -> Row:
    """Return the line with what is asked for: so many times as fast, and other marks."""
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
    """Return how many times faster than the reference a candidate is, and how near to the bound."""
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
    """Print what it is about and a table, write JSON where the command line says; return the code.

    The exit code is 1 if a mark was missed.
    """
    out = sys.stdout.write
    out(f"{(about or '').strip()}\n\n")
    out(
        f"{'workload':38s} {'candidate':22s} {'ms':>8s} {'quartiles':>17s} {'times':>6s}  "
        f"{'against':22s} {'asked':>6s} {'of the bound':>12s}\n"
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
    """Return a time with three digits that count."""
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
        out(f"marks: {asked - len(missed)} of {asked} reached\n")
    for text in missed:
        out(f"MISSED {text}\n")


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
