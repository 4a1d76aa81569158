"""The common workload, by the name in BENCH_WORKLOAD: batches of 20, 20 steps.

W1: MLP 784-100-10, 10 of 20 clients. W3: the small VGG on 3 x 32 x 32, 10 of 10 clients.
Every client has 400 rows, so that one epoch is 20 steps; there is no evaluation. This module
imports only torch and the standard library, which every environment has.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time

import torch
from torch import nn

NAME = os.environ.get("BENCH_WORKLOAD", "W1")
SHAPE: tuple[int, ...]
SHAPE, CLIENTS, COHORT, _ROUNDS = {"W1": ((784,), 20, 10, 20), "W3": ((3, 32, 32), 10, 10, 5)}[NAME]
ROWS, BATCH, STEPS, RATE = 400, 20, 20, 0.02
ROUNDS = int(os.environ.get("BENCH_ROUNDS", str(_ROUNDS)))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def module() -> nn.Module:
    """Return the model."""
    if NAME == "W1":
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 16, 32, 64, 128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random rows for each client: only time is measured."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, *SHAPE, generator=generator),
            torch.randint(0, 10, (ROWS,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]


def tell(ends: list[float]) -> None:
    """Print the wall-clock time of the end of the first round, and the times of later rounds."""
    rounds = [after - before for before, after in itertools.pairwise(ends)]
    first = time.time() - (time.perf_counter() - ends[0])
    found = {"first": first, "rounds": rounds, "median": statistics.median(rounds)}
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
