"""W1 for everybody: perceptron 784-100-10, batch 20, 20 steps, 10 of 20 clients.

Every client has 400 rows, so that one epoch is 20 steps. What is imported here must be in every
environment: torch and the standard library alone.
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

CLIENTS, COHORT, ROWS, BATCH, STEPS, RATE = 20, 10, 400, 20, 20, 0.02
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "20"))
STARTED = time.perf_counter()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def module() -> nn.Module:
    """Return the model."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random rows for each client: only time is measured."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, 784, generator=generator),
            torch.randint(0, 10, (ROWS,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]


def tell(ends: list[float]) -> None:
    """Print the seconds until the first round was over, and of every later round."""
    rounds = [after - before for before, after in itertools.pairwise(ends)]
    found = {"startup": ends[0] - STARTED, "rounds": rounds, "median": statistics.median(rounds)}
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
