"""A tiny federation in float64 of devices with budgets, widths and speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from tests.reference_unequal import Draws, Rows, Weights
from torch import nn

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine import sampling
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn.models.width import scaled
from parsifl.nn.neural import NeuralProblem

SIZES = (11, 16, 7, 24, 13)
FEATURES, FIRST, SECOND, CLASSES = 6, 8, 4, 3
SEED, ROUNDS, PARTICIPATION = 3, 3, 0.8
Engine = Literal["loop", "fused"]
ENGINES: tuple[Engine, ...] = ("loop", "fused")
Profiles = Sequence[Mapping[str, Any]]


def network(width: float = 1.0) -> nn.Module:
    first, second = scaled(FIRST, width), scaled(SECOND, width)
    layers = nn.Linear(FEATURES, first), nn.Linear(first, second), nn.Linear(second, CLASSES)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


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


def with_profiles(profiles: Profiles | None) -> ClientData:
    return DATA if profiles is None else replace(DATA, profiles=tuple(profiles))


def run(
    method: AnyAlgorithm,
    profiles: Profiles | None = None,
    engine: Engine = "loop",
    *,
    rounds: int = ROUNDS,
    participation: float = PARTICIPATION,
    evaluate: bool = False,
) -> Run:
    done = simulate(
        method, PROBLEM, with_profiles(profiles), rounds, seed=SEED, participation=participation,
        executor=engine, evaluate_every=int(evaluate),
    )  # fmt: skip
    assert not any(record["notes"] or record["dropped"] for record in done.metrics)
    return done


def cohorts(rounds: int = ROUNDS) -> list[list[int]]:
    keys = (Key(SEED, round=round) for round in range(rounds))
    return [[int(i) for i in sampling.choose(len(SIZES), PARTICIPATION, key)] for key in keys]


def draws(method: AnyAlgorithm, profiles: Profiles | None = None) -> Draws:
    """Return the very mini-batches that the engine draws for `local`."""
    data = with_profiles(profiles)
    shards, infos = BatchSampler(data, PROBLEM), Infos(data)

    def rows(round: int, client: int) -> list[Rows]:
        work = method.batches(infos[client], round)
        return _rows(shards.draw(client, work, Key(SEED, round=round))["train"])

    return rows


def tuning(method: AnyAlgorithm, client: int) -> list[Rows]:
    """Return the mini-batches that fine-tune a client when a run has ended."""
    key = Key(SEED, round=ROUNDS - 1, purpose="tuning")
    work = method.personalization_batches(Infos(DATA)[client])
    return _rows(BatchSampler(DATA, PROBLEM).draw(client, work, key)["tune"])


def _rows(batches: Any) -> list[Rows]:
    return [(b.x.numpy(), b.y.numpy(), b.weight.numpy()) for b in batches]


def sizes() -> list[float]:
    return [float(len(part)) for part in DATA.train]


def start(key: Key | None = None) -> Weights:
    return arrays(PROBLEM.init(key or Key(SEED)))


def arrays(params: Mapping[str, Any]) -> Weights:
    return {name: value.numpy().copy() for name, value in params.items()}


def assert_same(found: Mapping[str, Any], expected: Weights, tolerance: float = 1e-12) -> None:
    ours = arrays(found)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=tolerance, atol=tolerance)
