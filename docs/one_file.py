"""FedAvg in one file, without the library's machinery: the readable twin of `fedavg`.

Every client takes SGD steps from the global model on its own rows; the server averages the results,
weighted by rows. A test checks that `parsifl.simulate` gives the same parameters on full batches.

    python docs/one_file.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Client = tuple[Tensor, Tensor]
"""The rows and labels of one client."""


def client_update(model: nn.Module, client: Client, lr: float, steps: int) -> nn.Module:
    """Return a copy of the model after some SGD steps on all rows of a client."""
    local, (x, y) = copy.deepcopy(model), client
    optimizer = torch.optim.SGD(local.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(local(x), y).backward()
        optimizer.step()
    return local


def aggregate(model: nn.Module, updates: Sequence[tuple[nn.Module, int]]) -> None:
    """Replace the parameters of the model by the mean over clients, weighted by rows."""
    total = sum(rows for _, rows in updates)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            for local, rows in updates:
                parameter.add_(dict(local.named_parameters())[name], alpha=rows / total)


def fedavg(
    model: nn.Module, clients: Sequence[Client], rounds: int, lr: float, steps: int
) -> nn.Module:
    """Train a global model; return it."""
    model = copy.deepcopy(model)
    for _ in range(rounds):
        updates = [(client_update(model, client, lr, steps), len(client[0])) for client in clients]
        aggregate(model, updates)
    return model


def accuracy(model: nn.Module, clients: Sequence[Client]) -> float:
    """Return the share of rows that the model classifies correctly."""
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in clients)
    return right / sum(len(y) for _, y in clients)


def example(count: int = 5, rows: int = 40) -> tuple[nn.Module, list[Client]]:
    """Return a linear model and clients whose labels follow one of three features."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, rows, 6, generator=generator, dtype=torch.float64)
    clients = [(own, own[:, :3].argmax(1)) for own in x]
    model = nn.Linear(6, 3, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model, clients


if __name__ == "__main__":
    start, federation = example()
    trained = fedavg(start, federation, rounds=20, lr=0.5, steps=5)
    print(f"accuracy {accuracy(start, federation):.3f} -> {accuracy(trained, federation):.3f}")
