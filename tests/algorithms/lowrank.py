"""A tiny federation in float64 with a two-layer network, and its mini-batches for NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from tests.reference_lowrank import Draws, Rows, Weights
from torch import nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.config import Precision
from parsifl.core.keys import Key
from parsifl.core.leaves import densify
from parsifl.data.clients import ClientData
from parsifl.engine import sampling
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem

SIZES = (11, 16, 7, 24, 13)
FEATURES, HIDDEN, CLASSES = 6, 5, 3
SEED, ROUNDS, PARTICIPATION = 3, 4, 0.6
Engine = Literal["loop", "fused"]
ENGINES: tuple[Engine, ...] = ("loop", "fused")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


PROBLEM = NeuralProblem(network, dtype=torch.float64)


def _clients() -> ClientData:
    draw = np.random.default_rng(0)
    rows = [
        (draw.normal(size=(n, FEATURES)) + draw.normal(), draw.integers(CLASSES, size=n))
        for n in SIZES
    ]
    rows[0][1][:CLASSES] = range(CLASSES)
    return ClientData.of(rows, test=0.25)


DATA = _clients()
INFOS = Infos(DATA)


def run(
    method: AnyAlgorithm,
    engine: Engine = "loop",
    *,
    rounds: int = ROUNDS,
    participation: float = PARTICIPATION,
    precision: Precision = "exact",
) -> Run:
    done = simulate(
        method, PROBLEM, DATA, rounds, seed=SEED, participation=participation, executor=engine,
        evaluate_every=0, precision=precision,
    )  # fmt: skip
    assert not any(record["notes"] or record["dropped"] for record in done.metrics)
    return done


def cohorts(rounds: int = ROUNDS, participation: float = PARTICIPATION) -> list[list[int]]:
    keys = (Key(SEED, round=round) for round in range(rounds))
    return [[int(i) for i in sampling.choose(len(SIZES), participation, key)] for key in keys]


def draws(method: AnyAlgorithm) -> Draws:
    """Return the very mini-batches that the engine draws for `local`."""
    shards = BatchSampler(DATA, PROBLEM)

    def rows(round: int, client: int, name: str) -> list[Rows]:
        work = method.batches(INFOS[client], round)
        batches = shards.draw(client, work, Key(SEED, round=round))[name]
        return [(b.x.numpy(), b.y.numpy(), b.weight.numpy()) for b in batches]

    return rows


def all_rows(client: int) -> Rows:
    rows = BatchSampler(DATA, PROBLEM).rows(DATA.train[client])
    return rows.x.numpy(), rows.y.numpy(), rows.weight.numpy()


def sizes() -> list[int]:
    return [len(part) for part in DATA.train]


def start() -> Weights:
    return arrays(PROBLEM.init(Key(SEED)))


def arrays(params: Mapping[str, Any]) -> Weights:
    return {name: value.double().numpy().copy() for name, value in densify(dict(params)).items()}


def assert_same(found: Mapping[str, Any], expected: Weights, tolerance: float = 1e-12) -> None:
    ours = arrays(found)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=tolerance, atol=tolerance)
