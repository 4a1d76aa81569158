"""What a round costs follows from its cohort, not from the number of clients or of their states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fixtures import classifier, clients
from torch import nn

import parsifl
from parsifl.algorithms.ditto import Ditto
from parsifl.core import tree
from parsifl.data.clients import ClientData, Ragged
from parsifl.engine.state_store import StateStore
from parsifl.testing.conformance.harness import snapshot

METHOD = Ditto(lr=0.1, local_steps=2, batch_size=5)


def crowd(count: int) -> ClientData:
    """Return clients that own five rows each of a small pool."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(500, 20)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, 3, 500))
    owned = Ragged(random.integers(0, 500, 5 * count), np.arange(0, 5 * count + 1, 5))
    nobody = Ragged.empty(count)
    return ClientData(x, y, owned, nobody, nobody, ({},) * count, classes=3)


def seconds(data: ClientData, rounds: int) -> list[float]:
    """Return the CPU time of rounds, the first one left out: other programs change it little."""
    ends: list[float] = []
    parsifl.simulate(
        METHOD,
        parsifl.NeuralProblem(lambda: nn.Linear(20, 3)),
        data,
        rounds,
        participation=50 / len(data),
        evaluate_every=0,
        state_limit=20_000,
        callbacks=[lambda _: ends.append(time.process_time())],
    )
    return [float(taken) for taken in np.diff(ends)]


@pytest.mark.slow
def test_a_round_takes_as_long_with_many_clients_as_with_few() -> None:
    few, many = crowd(1_000), crowd(200_000)
    taken: dict[int, list[float]] = {1_000: [], 200_000: []}
    for _ in range(3):  # in turn: what else the machine does hits both
        for data in (few, many):
            taken[len(data)] += seconds(data, 12)
    assert np.quantile(taken[200_000], 0.25) < 1.5 * np.quantile(taken[1_000], 0.25)


def start_seconds(count: int, folder: Path) -> float:
    """Return the CPU time to stack the rows of some clients and run a round with ten of them."""
    started = time.process_time()
    x, y = np.zeros((4, 20), np.float32), np.arange(4) % 2
    data = ClientData.of([(x, y)] * count)
    problem = parsifl.NeuralProblem(lambda: nn.Linear(20, 2))
    options: dict[str, Any] = {"participation": 10 / count, "evaluate_every": 0}
    parsifl.simulate(METHOD, problem, data, 1, run_dir=folder, **options)
    return time.process_time() - started


@pytest.mark.slow
def test_the_start_of_a_run_is_linear_in_the_number_of_clients(tmp_path: Path) -> None:
    start_seconds(100, tmp_path / "warm")
    few = start_seconds(10_000, tmp_path / "few")
    assert start_seconds(100_000, tmp_path / "many") < 15 * few


@pytest.mark.bits
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_run_with_little_memory_for_states_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_folder: bool
) -> None:
    held: list[int] = []
    save = StateStore.save

    def watched(self: StateStore, client: int, state: Any) -> None:
        save(self, client, state)
        held.append(self.held)

    monkeypatch.setattr(StateStore, "save", watched)
    data, options = (
        clients((6, 9, 8, 11, 7, 5)),
        {"participation": 0.5, "seed": 4, "checkpoint_seconds": 0.0},
    )
    free = parsifl.simulate(METHOD, classifier(), data, 8, **options)  # type: ignore[arg-type]  # by name
    limit = max(held) // 3
    held.clear()
    folder: Any = tmp_path if in_folder else None
    tight: Any = {**options, "state_limit": limit, "run_dir": folder}
    stopped = parsifl.simulate(METHOD, classifier(), data, 4 if in_folder else 8, **tight)
    if in_folder:
        stopped = parsifl.simulate(METHOD, classifier(), data, 8, **tight, resume=True)
    assert 0 < max(held) <= limit
    assert tree.same(snapshot(stopped), snapshot(free))
