"""Judging the personal models of all clients at once against a plain loop over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from timing import Row, interleaved, report, row
from torch import nn

import parsifl
from parsifl import models
from parsifl.data.clients import ClientData, Ragged
from parsifl.engine.choice import choose_executor
from parsifl.keys import Key

ROUND = Key(0, round=0)


@dataclass(frozen=True)
class Case:
    """Whose models are judged on how many rows."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    rows: int
    turns: int


CASES = (
    Case("perceptrons, 100 x 100 rows", lambda: models.build("mlp"), (784,), 100, 100, 9),
    Case("perceptrons, 1000 x 15 rows", lambda: models.build("mlp"), (784,), 1000, 15, 5),
    Case("VGG, 20 x 100 rows", lambda: models.build("vgg"), (3, 32, 32), 20, 100, 5),
)


def data_for(case: Case) -> ClientData:
    """Return random rows, a fifth of them for training."""
    generator = torch.Generator().manual_seed(0)
    each = case.rows + 20
    x = torch.randn(case.clients * each, *case.shape, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    rows = np.arange(len(x)).reshape(case.clients, each)
    train, test = Ragged.of(rows[:, :20]), Ragged.of(rows[:, 20:])
    profiles = ({},) * case.clients
    return ClientData(x, y, train, Ragged.empty(case.clients), test, profiles, classes=10)


def measure(case: Case) -> list[Row]:
    """Compare both, after one round in which everybody got a model of its own."""
    data, problem = data_for(case), parsifl.NeuralProblem(case.build)
    method = parsifl.get("ditto", lr=0.01, steps=1)
    run = parsifl.simulate(method, problem, data, 1, evaluate_every=0)
    executor, block = choose_executor("auto", problem)
    ids = range(case.clients)
    personal = [run.personal(client).params for client in ids]

    def ours() -> float:
        found = run._judge.personal_scores(
            run.server, run._store, ids, "test", ROUND, executor, block
        )
        assert found is not None
        return float(found.values["accuracy"].mean())

    module, total = case.build().eval(), 0.0

    @torch.no_grad()
    def plain() -> float:
        nonlocal total
        total = 0.0
        for client in ids:
            module.load_state_dict(personal[client])
            x, y = data.x[data.test[client]], data.y[data.test[client]]
            logits = module(x)
            nn.functional.cross_entropy(logits, y)
            total += float((logits.argmax(1) == y).float().mean())
        return total / case.clients

    gap = abs(ours() - plain())
    if gap > 1e-3:
        raise AssertionError(f"the two accuracies differ by {gap}")
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = interleaved({"plain": plain, "ours": ours}, case.turns)
        label = f"{case.name}, {threads} thread{'s' if threads > 1 else ''}"
        rows += [
            row(label, timing, found["plain"].median, "plain loop") for timing in found.values()
        ]
    return rows


if __name__ == "__main__":
    report([item for case in CASES for item in measure(case)])
