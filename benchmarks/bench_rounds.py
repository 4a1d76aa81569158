"""A training round of the simulator against the same round as a plain PyTorch loop.

W1: perceptron 784-100-10, batch 20, 20 steps, 10 of 20 clients. W2: the same with 10 steps and 100
of 1000 clients. W3: the small VGG on 3 x 32 x 32, batch 20, 20 steps, 10 clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timing import Row, interleaved, report, row, sgemm_peak
from torch import nn

import parsifl
from parsifl import models, registry
from parsifl.data.clients import ClientData, Ragged
from parsifl.engine.choice import choose_executor
from parsifl.engine.flops import FlopCounter
from parsifl.engine.round import Setting, run_round
from parsifl.engine.shards import Infos, Shards
from parsifl.engine.simulate import WINDOW
from parsifl.engine.store import ClientStore
from parsifl.keys import Key

THREADS = (1, 2)


@dataclass(frozen=True)
class Workload:
    """What is trained, by how many clients, how long."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    cohort: int
    steps: int
    rows: int
    flops: float  # of one round, forward and backward
    turns: int


WORKLOADS = (
    Workload("W1 perceptron, 10 of 20", lambda: models.build("mlp"), (784,), 20, 10, 20, 2000,
             1.278e9, 15),
    Workload("W2 perceptron, 100 of 1000", lambda: models.build("mlp"), (784,), 1000, 100, 10, 60,
             6.392e9, 7),
    Workload("W3 VGG, 10 of 10", lambda: models.build("vgg"), (3, 32, 32), 10, 10, 20, 400,
             106.2e9, 5),
)  # fmt: skip


def data_for(work: Workload) -> ClientData:
    """Make random rows: only time is measured."""
    generator = torch.Generator().manual_seed(0)
    total = work.clients * work.rows
    x = torch.randn(total, *work.shape, generator=generator)
    y = torch.randint(0, 10, (total,), generator=generator)
    train = Ragged.from_sizes(np.arange(total), np.full(work.clients, work.rows))
    empty = Ragged.empty(work.clients)
    return ClientData(x, y, train, empty, empty, ({},) * work.clients, classes=10)


def plain_loop(work: Workload, data: ClientData, extra: Callable[..., None] | None) -> Any:
    """Train a cohort as one would by hand: a copy of the model and an optimizer each."""
    model, x, y = work.build(), data.x, data.y
    generator = np.random.default_rng(0)

    def run() -> None:
        total: list[torch.Tensor] | None = None
        for client in range(work.cohort):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.02)
            start = [p.detach().clone() for p in local.parameters()]
            for _ in range(work.steps):
                rows = torch.from_numpy(generator.choice(data.train[client], 20))
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x[rows]), y[rows]).backward()
                if extra is not None:
                    extra(local, start)
                optimizer.step()
            params = [p.detach() for p in local.parameters()]
            total = params if total is None else [a + b for a, b in zip(total, params, strict=True)]

    return run


def proximal(local: nn.Module, start: list[torch.Tensor]) -> None:
    """Add FedProx's term to the gradients."""
    for parameter, origin in zip(local.parameters(), start, strict=True):
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach() - origin, alpha=1e-4)


def simulated(work: Workload, data: ClientData, name: str, engine: Any) -> Callable[[], None]:
    """Return one round of the simulator, the drawing of batches and the mean included."""
    method, problem = registry.get(name, steps=work.steps), parsifl.NeuralProblem(work.build)
    executor, block = choose_executor(engine, problem)
    infos = Infos(data)
    setting = Setting(
        method=method,
        problem=problem,
        infos=infos,
        pool=range(len(infos)),
        shards=Shards(data, problem),
        store=ClientStore(),
        executor=executor,
        block=block,
        window=WINDOW,
        precision="exact",
        network=parsifl.Network(),
        flops=FlopCounter(method, problem),
    )
    server = method.init_server(problem, infos, Key(0))
    cohort = list(range(work.cohort))
    rounds = iter(range(10**9))

    def run() -> None:
        run_round(setting, server, cohort, Key(0, round=next(rounds)))

    return run


def measure(work: Workload) -> list[Row]:
    """Compare every engine with the loop at its best number of threads."""
    data = data_for(work)
    found: dict[int, dict[str, Any]] = {}
    peak = 0.0
    for threads in THREADS:
        torch.set_num_threads(threads)
        peak = max(peak, sgemm_peak())
        candidates = {
            "plain": plain_loop(work, data, None),
            "auto": simulated(work, data, "fedavg", "auto"),
        }
        if work.name.startswith("W1"):
            candidates |= {
                "plain fedprox": plain_loop(work, data, proximal),
                "fedprox": simulated(work, data, "fedprox", "auto"),
                "sequential": simulated(work, data, "fedavg", "sequential"),
            }
        found[threads] = interleaved(candidates, work.turns)
    rows = []
    bound = work.flops / peak
    for name in found[THREADS[0]]:
        reference = "plain fedprox" if "fedprox" in name else "plain"
        best_reference = min(found[t][reference].median for t in THREADS)
        for threads in THREADS:
            timing = found[threads][name]
            label = f"{work.name}, {threads} thread{'s' if threads > 1 else ''}"
            share = 100 * bound / timing.median
            against = f"{reference} (best threads); {share:.0f} % of the sgemm bound"
            rows.append(row(label, timing, best_reference, against))
    return rows


if __name__ == "__main__":
    report([item for work in WORKLOADS for item in measure(work)])
