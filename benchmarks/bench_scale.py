"""What a round costs when there are many clients: time, start-up and the peak of memory.

Every case runs in a process of its own, so that its peak is its own. Cohorts are of 100 clients
and keep a state of 318 kB each, of which 64 MB may be in memory. The times of the other cases are
compared with those of 1,000 clients. Goals: the same round and the same memory for a million
clients, a start within 5 s for 100,000, and 500 clients with four layers below 5 GB.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from timing import Row, Timing, report, row

MEGABYTE = 1 << 20
COHORT, ROUNDS, ROWS = 100, 20, 20_000
MAPPED_ROWS, MAPPED_LIMIT = 6_400_000, 2 << 30


def crowd(clients: int) -> Any:
    """Return many clients that own 10 rows each of a pool."""
    import torch

    from parsifl.data.clients import ClientData, Ragged

    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(ROWS, 784)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, 10, ROWS))
    owned = Ragged(random.integers(0, ROWS, 10 * clients), np.arange(0, 10 * clients + 1, 10))
    nobody = Ragged.empty(clients)
    return ClientData(x, y, owned, nobody, nobody, ({},) * clients, classes=10)


def simulated(data: Any, build: Any, cohort: int, rounds: int) -> list[float]:
    """Run Ditto, whose clients keep a model of their own; return when the rounds ended."""
    import parsifl

    ends: list[float] = []
    parsifl.simulate(
        parsifl.get("ditto", lr=0.01, steps=2, batch=10),
        parsifl.NeuralProblem(build),
        data,
        rounds,
        participation=cohort / len(data),
        evaluate_every=0,
        state_limit=64 * MEGABYTE,
        progress=lambda _: ends.append(time.perf_counter()),
    )
    return ends


def perceptron() -> Any:
    """Return 784-100-10."""
    from parsifl import models

    return models.build("mlp")


def four_layers() -> Any:
    """Return two convolutions and two linear layers for 3 x 32 x 32."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def registered(clients: int) -> list[float]:
    """Sample 100 of many registered clients."""
    return simulated(crowd(clients), perceptron, COHORT, ROUNDS)


def own_lists() -> list[float]:
    """Pool 100,000 pairs of a user's own arrays."""
    from parsifl.data.clients import ClientData

    x, y = np.zeros((4, 784), np.float32), np.arange(4) % 2
    data = ClientData.of([(x, y)] * 100_000)
    return simulated(data, perceptron, COHORT, 5)


def pictures() -> list[float]:
    """Train 500 clients, all of them in every round."""
    from parsifl.data.clients import ClientData

    random = np.random.default_rng(0)
    pairs = [
        (random.normal(size=(60, 3, 32, 32)).astype(np.float32), random.integers(0, 10, 60))
        for _ in range(500)
    ]
    return simulated(ClientData.of(pairs), four_layers, 500, 3)


def mapped() -> list[float]:
    """Read 20 GB from a file (of zeros that take no place) with 2 GB of memory."""
    from parsifl.data.clients import ClientData, Ragged

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.lib.format.open_memmap(path, "w+", np.float32, (MAPPED_ROWS, 784))
        resource.setrlimit(resource.RLIMIT_DATA, (MAPPED_LIMIT, MAPPED_LIMIT))
        x: Any = np.load(path, mmap_mode="r")
        y: Any = np.zeros(MAPPED_ROWS, np.int64)
        owned = Ragged(np.arange(MAPPED_ROWS), np.arange(0, MAPPED_ROWS + 1, 640))
        nobody = Ragged.empty(len(owned))
        data = ClientData(x, y, owned, nobody, nobody, ({},) * len(owned), classes=10)
        return simulated(data, perceptron, COHORT, ROUNDS)


CASES: dict[str, Callable[[], list[float]]] = {
    "100 of 1,000": lambda: registered(1_000),
    "100 of 100,000": lambda: registered(100_000),
    "100 of 1,000,000": lambda: registered(1_000_000),
    "100 of 100,000 pairs of arrays": own_lists,
    "20 GB of data in 2 GB of memory": mapped,
    "500 of 500, four layers": pictures,
}


def child(case: str) -> None:
    """Run one case and print what it took."""
    from parsifl.engine import simulate  # noqa: F401 - imports are not what is measured

    started = time.perf_counter()
    ends = CASES[case]()
    rounds = [after - before for before, after in itertools.pairwise(ends)]
    peaks = [resource.getrusage(who).ru_maxrss
             for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # fmt: skip
    found = {"startup": ends[0] - started, "rounds": rounds, "peak": sum(peaks) / 1024}
    sys.stdout.write(json.dumps(found))


def timing(case: str) -> tuple[Timing, str]:
    """Run one case in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", case], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    low, median, high = statistics.quantiles(found["rounds"], n=4)
    text = f"first round after {found['startup']:.1f} s, peak {found['peak']:.0f} MB"
    return Timing("ditto", median, low, high), text


def main() -> None:
    """Run all cases."""
    rows: list[Row] = []
    reference = 0.0
    for case in CASES:
        found, text = timing(case)
        reference = reference or found.median
        rows.append(row(case, found, reference, f"1,000 clients; {text}"))
    report(rows)


if __name__ == "__main__":
    if "--case" in sys.argv:
        child(sys.argv[sys.argv.index("--case") + 1])
    else:
        main()
