"""A small sparse regression, and the mini-batches that the engine draws on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.reference_sparse import Client
from torch import Tensor

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM

WIDTH = 12


def clients(noise: float = 0.05, seed: int = 0) -> list[Client]:
    draw = np.random.default_rng(seed)
    truth = np.zeros(WIDTH)
    truth[[1, 4, 7]] = [2.0, -1.5, 1.0]
    made = []
    for rows in (9, 14, 11):
        z = draw.standard_normal((rows, WIDTH)) + draw.normal(0, 0.3)
        made.append((z, z @ truth + noise * draw.standard_normal(rows)))
    return made


def data(some: list[Client]) -> ClientData:
    return ClientData.of(some, test=0.0)


def rows_of(pooled: ClientData) -> list[Client]:
    """Return each client's rows in the order of its row numbers."""
    x: Any = pooled.x
    return [(x[rows].numpy(), pooled.y[rows].numpy()) for rows in pooled.train]


def draws(method: AnyAlgorithm, problem: Any, pooled: ClientData, rounds: int, name: str) -> Any:
    """Return the batches of every round and client as positions in the client's rows."""
    shards, infos = BatchSampler(pooled, problem), Infos(pooled)
    found = []
    for round in range(rounds):
        row = []
        for info in infos:
            work = method.batches(info, round)
            batches = shards.draw(info.id, work, Key(0, round))[name]
            place = {int(number): at for at, number in enumerate(pooled.train[info.id])}
            row.append(
                [
                    np.array([place[int(n)] for n in numbers[weight > 0]])
                    for numbers, weight in zip(batches.index, batches.weight, strict=True)
                ]
            )
        found.append(row)
    return found


def trained(
    method: AnyAlgorithm,
    pooled: ClientData,
    rounds: int,
    *,
    engine: Any = "auto",
    problem: Any = None,
) -> Tensor:
    run = simulate(
        method, problem or GLM(WIDTH, "squared"), pooled, rounds, executor=engine, evaluate_every=0
    )
    assert not run.metrics[-1]["notes"]
    assert not run.metrics[-1]["dropped"]
    return run.model.params["coef"]


def same_batched(method: AnyAlgorithm, pooled: ClientData, rounds: int, **more: Any) -> None:
    """Check that one by one and all at once give the same numbers."""
    alone = trained(method, pooled, rounds, engine="loop", **more)
    together = trained(method, pooled, rounds, engine="fused", **more)
    torch.testing.assert_close(alone, together, rtol=1e-12, atol=1e-12)
