"""A tiny federation in float64, and its mini-batches as the NumPy references want them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from tests.reference_personal import Array, Draws, Rows
from torch import Tensor, nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import ClientRoundData
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine import sampling
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem

SIZES = (11, 16, 7, 24, 13)
FEATURES, CLASSES = 4, 3
SEED, ROUNDS, PARTICIPATION = 3, 3, 0.6
ENGINES: tuple[Literal["loop", "fused"], ...] = ("loop", "fused")

PROBLEM = NeuralProblem(lambda: nn.Linear(FEATURES, CLASSES), dtype=torch.float64)


def clients() -> ClientData:
    draw = np.random.default_rng(0)
    rows = [
        (draw.normal(size=(n, FEATURES)) + draw.normal(), draw.integers(CLASSES, size=n))
        for n in SIZES
    ]
    rows[0][1][:CLASSES] = range(CLASSES)
    return ClientData.of(rows, test=0.25)


DATA = clients()
INFOS = Infos(DATA)


def run(method: AnyAlgorithm, engine: Literal["loop", "fused"] = "loop") -> Run:
    done = simulate(
        method, PROBLEM, DATA, ROUNDS, seed=SEED, participation=PARTICIPATION, executor=engine
    )
    assert not any(record["notes"] or record["dropped"] for record in done.metrics)
    return done


def cohorts() -> list[list[int]]:
    keys = (Key(SEED, round=round) for round in range(ROUNDS))
    return [sampling.choose(len(SIZES), PARTICIPATION, key) for key in keys]


def draws(method: AnyAlgorithm, name: str = "train") -> Draws:
    """Return the very mini-batches that the engine draws for `local`."""

    return lambda round, client: _rows(shard(method, round, client)[name])


def shard(method: AnyAlgorithm, round: int, client: int) -> ClientRoundData:
    """Return what `local` reads."""
    work = method.batches(INFOS[client], round)
    return BatchSampler(DATA, PROBLEM).draw(client, work, Key(SEED, round=round))


def tuning(method: AnyAlgorithm, client: int, name: str) -> list[Rows]:
    """Return the mini-batches that personalise a client when a run has ended."""
    key = Key(SEED, round=ROUNDS - 1)
    work = method.personalization_batches(INFOS[client])
    return _rows(BatchSampler(DATA, PROBLEM).draw(client, work, key)[name])


def _rows(batches: Any) -> list[Rows]:
    return [Rows(b.x.numpy(), b.y.numpy(), b.weight.numpy()) for b in batches]


def start() -> Array:
    return array(PROBLEM.init(Key(SEED)))


def array(params: dict[str, Tensor]) -> Array:
    """Return [W | b]."""
    joined: Array = torch.cat([params["weight"], params["bias"][..., None]], -1).numpy()
    return joined


def with_rows(count: int) -> ClientData:
    """Return the data with only `count` training rows on client 2."""
    train = [np.asarray(part) for part in DATA.train]
    train[2] = train[2][:count]
    return replace(DATA, train=train)


def by_epochs(settings: dict[str, Any], epochs: float) -> dict[str, Any]:
    """Return settings that measure local work in epochs, which excludes `local_steps`."""
    return {name: v for name, v in settings.items() if name != "local_steps"} | {"epochs": epochs}
