"""A workload as a plain PyTorch loop."""

from __future__ import annotations

import copy
import time

import torch
import workload
from torch import nn


def main() -> None:
    """Train a copy of the model for each client of the cohort and take the mean."""
    model, data, ends = workload.module(), workload.data(), []
    for _ in range(workload.ROUNDS + 1):
        total: list[torch.Tensor] | None = None
        for client in torch.randperm(workload.CLIENTS)[: workload.COHORT].tolist():
            local, (x, y) = copy.deepcopy(model), data[client]
            optimizer = torch.optim.SGD(local.parameters(), lr=workload.RATE)
            for rows in torch.randperm(workload.ROWS).split(workload.BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x[rows]), y[rows]).backward()
                optimizer.step()
            params = [p.detach() for p in local.parameters()]
            total = params if total is None else [a + b for a, b in zip(total, params, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), total or [], strict=True):
                parameter.copy_(value / workload.COHORT)
        ends.append(time.perf_counter())
    workload.tell(ends)


if __name__ == "__main__":
    main()
