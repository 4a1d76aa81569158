"""A training round of the simulator, compared with the same round as a plain PyTorch loop.

W1: MLP 784-100-10, batch 20, 20 steps, 10 of 20 clients. W2: the same with 10 steps and 100 of 1000
clients. W3: the small VGG on 3 x 32 x 32, batch 20, 20 steps, 10 clients. W1 also runs other
algorithms with their own plain loops, a module outside the fused path (under vmap), and FedAvg
while another program uses one core. "auto" is FedAvg with the default executor, "loop" FedAvg with
executor="loop", "plain ..." a handwritten loop. Each is measured with one thread and with two, and
compared with its loop at that loop's better number of threads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from plain import Coupling, Workload, averaging, coupled, data_for
from timing import (
    THREADS,
    Mark,
    Row,
    Timing,
    at_least,
    chosen,
    interleaved,
    marked,
    products,
    progress,
    report,
    row,
)
from torch import Tensor, nn

import parsifl
from parsifl.core import registry
from parsifl.data.clients import ClientData
from parsifl.engine.executors import choose_executor
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram
from parsifl.engine.training import Training
from parsifl.nn import models

W1 = Workload("W1 MLP, 10 of 20", lambda: models.build("mlp"), (784,), 20, 10, 20, 2000, 1.278e9, 9)
W2 = Workload(
    "W2 MLP, 100 of 1000", lambda: models.build("mlp"), (784,), 1000, 100, 10, 60, 6.392e9, 5
)
W3 = Workload(
    "W3 VGG, 10 of 10", lambda: models.build("vgg"), (3, 32, 32), 10, 10, 20, 400, 106.2e9, 3
)
MAC = {"gamma": 1e-4, "gamma_w": 1e-4}
PASSES = {"plain pfedme": 5, "pfedme": 5}  # gradients a batch, where there is not one
TIMES = {
    ("W1", "auto"): 5.0,
    ("W1", "loop"): 0.95,
    ("W1", "fedprox"): 4.5,
    ("W1", "fedmac"): 3.5,
    ("W1", "l1-fedmac"): 3.5,
    ("generic", "auto"): 2.0,
    ("busy", "auto"): 2.0,
    ("W2", "auto"): 5.0,
    ("W3", "auto"): 1.4,
}
"""Target speedup over the loop, at the better number of threads."""
SHARES = {("W1", "auto"): 0.4}
"""Target share of the bound."""
Candidates = Mapping[str, Callable[[], object]]


class Generic(nn.Module):
    """W1's MLP with a scaling that no fast path supports."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(784, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.body(x)
        logits: Tensor = self.head(hidden * (hidden > 0))
        return logits


def simulated(
    work: Workload, data: ClientData, name: str, engine: Any = "auto", **options: Any
) -> Callable[[], None]:
    """Return one round of the simulator, including drawing batches and averaging."""
    method = registry.get(name, local_steps=work.steps, **options)
    problem = parsifl.NeuralProblem(work.build)
    executor, block = choose_executor(engine, problem)
    pool = LocalPool(ClientProgram(method, problem), data, executor=executor, block=block)
    training = Training(method, problem, pool, participation=work.cohort / len(data))
    server, rounds = training.initial_server(), iter(range(10**9))

    def run() -> None:
        training.round(server, next(rounds))

    return run


def basic(work: Workload) -> Candidates:
    """Return FedAvg as a plain loop and simulated."""
    data = data_for(work)
    return {"plain": averaging(work, data), "auto": simulated(work, data, "fedavg")}


def methods(work: Workload) -> Candidates:
    """Return algorithms, each with the loop that it is compared with."""
    data = data_for(work)
    mac, me = Coupling(0.05, 3000.0, 1e-4), Coupling(0.09, 0.005, 15.0, decay=15.0, inner=5)
    sparse = Coupling(0.05, 3000.0, 1e-4, gamma=1e-4)
    return {
        "plain": averaging(work, data),
        "auto": simulated(work, data, "fedavg"),
        "loop": simulated(work, data, "fedavg", "loop"),
        "plain fedprox": averaging(work, data, mu=1e-4),
        "fedprox": simulated(work, data, "fedprox"),
        "plain fedmac": coupled(work, data, mac),
        "fedmac": simulated(work, data, "fedmac"),
        "plain l1-fedmac": coupled(work, data, sparse),
        "l1-fedmac": simulated(work, data, "fedmac", **MAC),
        "plain pfedme": coupled(work, data, me),
        "pfedme": simulated(work, data, "pfedme"),
    }


def measure(part: str, work: Workload, candidates: Candidates) -> list[Row]:
    """Compare every candidate with its loop at that loop's best number of threads."""
    found: dict[int, dict[str, Timing]] = {}
    progress(work.name)
    products(work.flops)
    for threads in THREADS:
        torch.set_num_threads(threads)
        found[threads] = interleaved(candidates, work.turns)
    bound = products(work.flops)  # the best of before and after
    rows = []
    for name in candidates:
        reference = name if name.startswith("plain") else f"plain {name}"
        reference = reference if reference in candidates else "plain"
        best = min(found[threads][reference].median for threads in THREADS)
        least = bound.times(PASSES.get(name, 1))
        lines = [
            row(
                f"{work.name}, {threads} thread{'s' if threads > 1 else ''}",
                found[threads][name],
                best,
                f"{reference}, best",
                least,
            )
            for threads in THREADS
        ]
        rows += with_marks(lines, part, name)
    return rows


def with_marks(lines: list[Row], part: str, name: str) -> list[Row]:
    """Add the targets of a candidate to the line of its better number of threads."""
    fastest = max(range(len(lines)), key=lambda at: lines[at].ratio)
    item, marks = lines[fastest], list[Mark]()
    if (part, name) in SHARES:
        marks.append(at_least(SHARES[part, name], item.bound or 0.0, "of the bound"))
    lines[fastest] = marked(item, TIMES.get((part, name)), *marks)
    return lines


@contextmanager
def busy_core() -> Iterator[None]:
    """Occupy one core with another process."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def busy() -> list[Row]:
    """Measure W1 while another program occupies one core."""
    candidates = basic(W1)
    with busy_core():
        return measure("busy", replace(W1, name="W1, one core busy"), candidates)


GENERIC = replace(W1, name="W1 as a generic module", build=Generic)
PARTS: dict[str, Callable[[], list[Row]]] = {
    "W1": lambda: measure("W1", W1, methods(W1)),
    "generic": lambda: measure("generic", GENERIC, basic(GENERIC)),
    "busy": busy,
    "W2": lambda: measure("W2", W2, basic(W2)),
    "W3": lambda: measure("W3", W3, basic(W3)),
}


if __name__ == "__main__":
    raise SystemExit(report([item for part in chosen(PARTS) for item in PARTS[part]()], __doc__))
