"""Evaluation of the global and the personal models of all clients, compared with a plain loop.

"100 x 100 rows": 100 clients with a model and 100 rows each. The loop evaluates both models on the
rows of each client, as Parsifl does. Both run with one thread and with two,
and are compared with the loop at its better number of threads. The bound is the larger of the time
of the layers' products and the time of reading rows and models once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from timing import THREADS, Row, interleaved, longer, moved, products, report, row
from torch import nn

import parsifl
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData, Ragged
from parsifl.engine.pool import ClientRequest
from parsifl.nn import models

ROUND = Key(0, round=0)


@dataclass(frozen=True)
class Case:
    """The models and the number of rows to evaluate."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    rows: int
    turns: int
    flops: float  # of one row, forward


MLP, VGG = 2.0 * (784 * 100 + 100 * 10), 8.85e6
CASES = (
    Case("MLPs, 100 x 100 rows", partial(models.build, "mlp"), (784,), 100, 100, 9, MLP),
    Case("MLPs, 1000 x 15 rows", partial(models.build, "mlp"), (784,), 1000, 15, 7, MLP),
    Case("VGG, 20 x 100 rows", partial(models.build, "vgg"), (3, 32, 32), 20, 100, 5, VGG),
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
    """Compare both, after one round in which every client got its own model."""
    data, problem = data_for(case), parsifl.NeuralProblem(case.build)
    method = parsifl.get("ditto", lr=0.01, local_steps=1)
    run = parsifl.simulate(method, problem, data, 1, evaluate_every=0)
    ids = range(case.clients)
    personal = [run.personal(client).params for client in ids]

    def ours() -> float:
        requests = (
            ClientRequest(run.pool.clients[client], ROUND, run.server, upload=False)
            for client in ids
        )
        found = run.pool.evaluate(requests, run.server)
        return float(np.mean([each.values["personal"]["test"]["accuracy"] for each in found]))

    module, shared = case.build().eval(), case.build().eval()
    shared.load_state_dict(run.server)

    @torch.no_grad()
    def plain() -> float:
        accuracies = {"global": 0.0, "personal": 0.0}
        for client in ids:
            module.load_state_dict(personal[client])
            x, y = data.x[data.test[client]], data.y[data.test[client]]
            for name, model in (("global", shared), ("personal", module)):
                logits = model(x)
                nn.functional.cross_entropy(logits, y)
                accuracies[name] += float((logits.argmax(1) == y).float().mean())
        return accuracies["personal"] / case.clients

    gap = abs(ours() - plain())
    if gap > 1e-3:
        raise AssertionError(f"the two accuracies differ by {gap}")
    found = {}
    evaluated = 2 * case.clients * case.rows
    read = evaluated // 2 * data.x[0].nbytes + case.clients * _size(personal[0])
    bound = longer(products(case.flops * evaluated), moved(read))
    for threads in THREADS:
        torch.set_num_threads(threads)
        found[threads] = interleaved({"plain": plain, "ours": ours}, case.turns)
    best = min(timings["plain"].median for timings in found.values())
    rows = []
    for threads, timings in found.items():
        label = f"{case.name}, {threads} thread{'s' if threads > 1 else ''}"
        rows += [row(label, timing, best, "plain, best", bound) for timing in timings.values()]
    return rows


def _size(params: Params) -> int:
    return sum(value.nbytes for value in params.values())


if __name__ == "__main__":
    raise SystemExit(report([item for case in CASES for item in measure(case)], __doc__))
