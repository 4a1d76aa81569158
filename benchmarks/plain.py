"""Rounds as plain PyTorch loops: a copy of the model and an optimizer for each client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsifl.data.clients import ClientData, Ragged

BATCH = 20


@dataclass(frozen=True)
class Workload:
    """Model, number of clients, and length of training."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    cohort: int
    steps: int
    rows: int
    flops: float  # of one round, forward and backward
    turns: int


@dataclass(frozen=True)
class Coupling:
    """What FedMac and pFedMe add: e(theta) = decay theta - lam w + gamma tanh(theta / rho)."""

    lr: float
    outer_lr: float
    lam: float
    decay: float = 0.0
    gamma: float = 0.0
    rho: float = 1e-2
    inner: int = 1


def data_for(work: Workload) -> ClientData:
    """Create random rows: only time is measured."""
    generator = torch.Generator().manual_seed(0)
    total = work.clients * work.rows
    x = torch.randn(total, *work.shape, generator=generator)
    y = torch.randint(0, 10, (total,), generator=generator)
    train = Ragged.from_sizes(np.arange(total), np.full(work.clients, work.rows))
    empty = Ragged.empty(work.clients)
    return ClientData(x, y, train, empty, empty, ({},) * work.clients, classes=10)


def averaging(work: Workload, data: ClientData, mu: float = 0.0) -> Callable[[], None]:
    """Return a round of FedAvg, or of FedProx with mu > 0."""

    def train(local: nn.Module, batches: Any) -> list[Tensor]:
        start = [p.detach().clone() for p in local.parameters()] if mu else []
        _descend(local, batches, 0.02, start, mu)
        return [p.detach() for p in local.parameters()]

    return _rounds(work, data, train)


def coupled(work: Workload, data: ClientData, form: Coupling) -> Callable[[], None]:
    """Return a round of FedMac or pFedMe: a personal model theta and the local model w."""

    def train(local: nn.Module, batches: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(local.parameters(), lr=form.lr)
        anchors = [p.detach().clone() for p in local.parameters()]
        for x, y in batches:
            for _ in range(form.inner):
                optimizer.zero_grad()
                nn.functional.cross_entropy(local(x), y).backward()
                for theta, w in zip(local.parameters(), anchors, strict=True):
                    _couple(theta, w, form)
                optimizer.step()
            for theta, w in zip(local.parameters(), anchors, strict=True):
                shrink = form.gamma * torch.tanh(w / form.rho) if form.gamma else 0.0
                w.sub_(form.outer_lr * (form.lam * (w - theta.detach()) + shrink))
        return anchors

    return _rounds(work, data, train)


def personal(
    build: Callable[[], nn.Module], data: ClientData, cohort: int, steps: int, batch: int
) -> Callable[[], None]:
    """Return a round of Ditto: clients keep a second model near the received one."""
    model, rate, pull = build(), 0.01, 0.1
    own: dict[int, nn.Module] = {}

    def run() -> None:
        total: list[Tensor] | None = None
        received = [p.detach() for p in model.parameters()]
        for client in torch.randperm(len(data))[:cohort].tolist():
            local, mine = copy.deepcopy(model), own.setdefault(client, copy.deepcopy(model))
            _descend(local, _batches(data, client, steps, batch), rate)
            _descend(mine, _batches(data, client, steps, batch), rate, received, pull)
            params = [p.detach() for p in local.parameters()]
            total = params if total is None else [a + b for a, b in zip(total, params, strict=True)]

    return run


def _descend(
    module: nn.Module, batches: Any, rate: float, anchors: Sequence[Tensor] = (), pull: float = 0.0
) -> None:
    """Take SGD steps, with a pull towards the anchors if there are any."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        for parameter, anchor in zip(module.parameters(), anchors, strict=False):
            _add(parameter, parameter.detach() - anchor, pull)
        optimizer.step()


def _couple(theta: nn.Parameter, w: Tensor, form: Coupling) -> None:
    value = theta.detach()
    if form.decay:
        _add(theta, value, form.decay)
    _add(theta, w, -form.lam)
    if form.gamma:
        _add(theta, torch.tanh(value / form.rho), form.gamma)


def _add(parameter: nn.Parameter, term: Tensor, factor: float) -> None:
    if parameter.grad is not None:
        parameter.grad.add_(term, alpha=factor)


def _rounds(
    work: Workload, data: ClientData, train: Callable[[nn.Module, Any], list[Tensor]]
) -> Callable[[], None]:
    model = work.build()

    def run() -> None:
        total: list[Tensor] | None = None
        for client in range(work.cohort):
            params = train(copy.deepcopy(model), _batches(data, client, work.steps))
            total = params if total is None else [a + b for a, b in zip(total, params, strict=True)]

    return run


def _batches(
    data: ClientData, client: int, steps: int, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the rows of a client in random order, repeatedly."""
    own = torch.from_numpy(data.train[client])
    epochs = -(-steps * batch // len(own))
    drawn = torch.cat([own[torch.randperm(len(own))] for _ in range(epochs)])
    for rows in drawn[: steps * batch].split(batch):
        yield data.x[rows], data.y[rows]
