"""Cost of a round with many clients: time, start-up and peak memory.

Every case runs in its own process, so that its peak is its own. Cohorts have 100 clients with a
state of 318 kB each; 64 MB of states may be in memory. Each case is compared with a plain loop over
the same cohort (or a part of it, if it is large), with the bound (the larger of the time of the
products and the time of moving rows and states once), and with the round of 1,000 clients. Targets:
the same round and the same memory for a million clients (within a quarter), a start within 5 s for
100,000, and 500 clients with four layers below 5 GB.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timing
from timing import (
    Bound,
    Mark,
    Row,
    Timing,
    at_most,
    chosen,
    longer,
    marked,
    moved,
    products,
    progress,
    report,
    row,
)

MEGABYTE = 1 << 20
COHORT, ROUNDS, ROWS, BATCH, STEPS = 100, 12, 20_000, 10, 2
MAPPED_ROWS, MAPPED_LIMIT = 6_400_000, 2 << 30
SAME, START, PEAK = 1.25, 5.0, 5000.0  # at most: of 1,000 clients' figures; seconds; megabytes
LOOPED, TURNS = 25, 3  # most clients of a plain loop, and how often it runs


@dataclass(frozen=True)
class Case:
    """Data, model, and the number of clients that train in a round."""

    data: Any
    build: Callable[[], Any]
    cohort: int = COHORT
    rounds: int = ROUNDS


def crowd(clients: int) -> Case:
    """Return many clients with 10 rows each of a pool."""
    import torch

    from parsifl.data.clients import ClientData, Ragged

    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(ROWS, 784)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, 10, ROWS))
    owned = Ragged(random.integers(0, ROWS, 10 * clients), np.arange(0, 10 * clients + 1, 10))
    nobody = Ragged.empty(clients)
    return Case(ClientData(x, y, owned, nobody, nobody, ({},) * clients, classes=10), perceptron)


def perceptron() -> Any:
    """Return 784-100-10."""
    from parsifl.nn import models

    return models.build("mlp")


def four_layers() -> Any:
    """Return two convolutions and two linear layers for 3 x 32 x 32."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def own_lists() -> Case:
    """Pool 100,000 pairs of a user's own arrays."""
    from parsifl.data.clients import ClientData

    x, y = np.zeros((4, 784), np.float32), np.arange(4) % 2
    return Case(ClientData.of([(x, y)] * 100_000), perceptron, rounds=5)


def pictures() -> Case:
    """Return 500 clients, all of which train in every round."""
    from parsifl.data.clients import ClientData

    random = np.random.default_rng(0)
    pairs = [
        (random.normal(size=(60, 3, 32, 32)).astype(np.float32), random.integers(0, 10, 60))
        for _ in range(500)
    ]
    return Case(ClientData.of(pairs), four_layers, 500, 3)


def mapped(folder: Path) -> Case:
    """Read 20 GB from a sparse file with 2 GB of memory."""
    from parsifl.data.clients import ClientData, Ragged

    path = folder / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (MAPPED_ROWS, 784))
    resource.setrlimit(resource.RLIMIT_DATA, (MAPPED_LIMIT, MAPPED_LIMIT))
    x: Any = np.load(path, mmap_mode="r")
    y: Any = np.zeros(MAPPED_ROWS, np.int64)
    owned = Ragged(np.arange(MAPPED_ROWS), np.arange(0, MAPPED_ROWS + 1, 640))
    nobody = Ragged.empty(len(owned))
    data = ClientData(x, y, owned, nobody, nobody, ({},) * len(owned), classes=10)
    return Case(data, perceptron, rounds=8)


CASES: dict[str, Callable[[Path], Case]] = {
    "100 of 1,000": lambda _: crowd(1_000),
    "100 of 100,000": lambda _: crowd(100_000),
    "100 of 1,000,000": lambda _: crowd(1_000_000),
    "100 of 100,000 pairs of arrays": lambda _: own_lists(),
    "20 GB of data in 2 GB of memory": mapped,
    "500 of 500, four layers": lambda _: pictures(),
}


def child(name: str) -> dict[str, Any]:
    """Run one case; return its cost, that of the plain loop, and the bound."""
    import parsifl
    from parsifl.engine import simulate  # noqa: F401 - imports are not what is measured

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        case, ends = CASES[name](Path(folder)), list[float]()
        run = parsifl.simulate(  # Ditto: clients keep their own model
            parsifl.get("ditto", lr=0.01, local_steps=STEPS, batch_size=BATCH),
            parsifl.NeuralProblem(case.build),
            case.data,
            case.rounds,
            participation=case.cohort / len(case.data),
            evaluate_every=0,
            state_limit=64 * MEGABYTE,
            callbacks=[lambda _: ends.append(time.perf_counter())],
        )
        peaks = [resource.getrusage(who).ru_maxrss
                 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # fmt: skip
        return {
            "startup": ends[0] - started,
            "peak": sum(peaks) / 1024,
            "rounds": [after - before for before, after in itertools.pairwise(ends)],
            "plain": plain_loop(case),
            "bound": asdict(bound(case, run.metrics[-1]["flops"])),
            "machine": timing.MEASURED,
        }


def plain_loop(case: Case) -> float:
    """Return the seconds of a plain round, with the better number of threads."""
    import torch
    from plain import personal

    some = min(case.cohort, LOOPED)
    loop = personal(case.build, case.data, some, STEPS, BATCH)
    found = []
    for threads in timing.THREADS:
        torch.set_num_threads(threads)
        found.append(timing.interleaved({"plain": loop}, TURNS)["plain"].median)
    return min(found) * case.cohort / some


def bound(case: Case, flops: float) -> Bound:
    """Return the bound of a round: a state is read and written, an upload and rows are read."""
    model = sum(p.nbytes for p in case.build().parameters())
    rows = 2 * STEPS * BATCH * case.data.x[0].nbytes
    return longer(products(flops), moved(case.cohort * (3 * model + rows)))


def measure(name: str) -> tuple[Timing, dict[str, Any]]:
    """Run one case in its own process."""
    progress(name)
    done = subprocess.run(
        [sys.executable, __file__, "--case", name], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    for kind, speed in found["machine"].items():
        timing.MEASURED[kind] = max(speed, timing.MEASURED.get(kind, 0.0))
    return timing.timing("ditto", found["rounds"]), found


def marks(name: str, round_: float, peak: float, found: dict[str, Any]) -> list[Mark]:
    """Return the targets of a case; round and peak are compared with those of 1,000 clients."""
    if name == "500 of 500, four layers":
        return [at_most(PEAK, found["peak"], "MB at the peak")]
    start = [at_most(START, found["startup"], "s until the end of the first round")]
    if not name.endswith("000"):
        return start if "100,000" in name else []
    return [
        *start,
        at_most(SAME, round_, "of the round of 1,000 clients"),
        at_most(SAME, peak, "of the memory of 1,000 clients"),
    ]


def main() -> int:
    """Run the selected cases."""
    rows: list[Row] = []
    first: tuple[float, float] | None = None
    for name in chosen(CASES):
        taken, found = measure(name)
        first = first or (taken.median, found["peak"])
        round_, peak = taken.median / first[0], found["peak"] / first[1]
        note = (
            f"{round_:.2f} of the first line; first round after {found['startup']:.1f} s, "
            f"peak {found['peak']:.0f} MB"
        )
        item = row(name, taken, found["plain"], "plain, best", Bound(**found["bound"]), note)
        rows.append(marked(item, None, *marks(name, round_, peak, found)))
    return report(rows, __doc__)


if __name__ == "__main__":
    if "--case" in sys.argv:
        sys.stdout.write(json.dumps(child(sys.argv[sys.argv.index("--case") + 1])))
    else:
        raise SystemExit(main())
