"""What FedSLR, FedDyn and SCAFFOLD share: a mean on the server of what the clients keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import lowrank

from parsifl.algorithms.composed import Composed
from parsifl.algorithms.feddyn import FedDyn
from parsifl.algorithms.fedslr import FedSLR
from parsifl.algorithms.scaffold import Scaffold
from parsifl.core import tree
from parsifl.engine.settings import Evaluation
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem
from parsifl.solvers.upload_transforms import TopK

SETTINGS: dict[str, Any] = {"lr": 0.2, "batch_size": 4, "local_steps": 5}
METHODS = [
    FedSLR(eta_g=2.0, lam=0.01, mu=0.1, **SETTINGS),
    FedDyn(alpha=0.3, **SETTINGS),
    Scaffold(**SETTINGS),
    Composed(FedDyn(alpha=0.3, **SETTINGS)),
]


def means(method: Any, clients: int, **options: Any) -> tuple[Any, Any]:
    """Return the server's mean, and the mean over the clients that may take part."""
    done = simulate(
        method, lowrank.PROBLEM, lowrank.DATA, 6, seed=lowrank.SEED,
        participation=lowrank.PARTICIPATION, evaluate_every=0, **options,
    )  # fmt: skip
    server = done.server.control if isinstance(method, Scaffold) else done.server.dual
    states = [state for _, state in done.pool.store]
    own = [state.dual if isinstance(method, FedSLR) else state for state in states]
    total = own[0]
    for dual in own[1:]:
        total = tree.add(total, dual)
    return server, tree.scale(1 / clients, total)


def gap(found: Any, wanted: Any) -> float:
    pairs = zip(tree.leaves(found), tree.leaves(wanted), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_clients_that_never_take_part_do_not_count(method: Any) -> None:
    options = {"evaluation": Evaluation(unseen=0.4)}
    assert gap(*means(method, len(lowrank.SIZES) - 2, **options)) < 1e-14


@pytest.mark.parametrize("executor", lowrank.ENGINES)
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_both_sides_use_what_a_lossy_wire_transmitted(
    method: Any, precision: Any, executor: Any
) -> None:
    options = {"precision": precision, "executor": executor}
    assert gap(*means(method, len(lowrank.SIZES), **options)) < 1e-13


@pytest.mark.parametrize("precision", ["exact", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "method", [m for m in METHODS if isinstance(m, FedSLR | FedDyn)], ids=lambda m: type(m).__name__
)
def test_with_few_entries_the_means_differ_by_what_waits_on_the_clients(
    method: Any, precision: Any
) -> None:
    done = simulate(
        Composed(method, uploads=(TopK(0.5),)), lowrank.PROBLEM, lowrank.DATA, 8,
        seed=lowrank.SEED, participation=lowrank.PARTICIPATION, precision=precision,
        evaluate_every=0,
    )  # fmt: skip
    alpha = method.alpha if isinstance(method, FedDyn) else 1 / method.eta_g
    total = tree.scale(float(len(lowrank.SIZES)), done.server.dual)
    for _, state in done.pool.store:
        dual = state.inner.dual if isinstance(method, FedSLR) else state.inner
        total = tree.axpy(-1.0, tree.axpy(alpha, state.stages[0], dual), total)
    assert max(float(leaf.abs().max()) for leaf in tree.leaves(total)) < 1e-13


def test_a_lossy_wire_moves_the_limit_by_no_more_than_its_rounding() -> None:
    """Where all clients take part, gradients are taken at the model that was sent."""
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(4, 3))
    rows = [(x := draw.normal(size=(30, 4)) + shift, x @ truth) for shift in (0.0, 1.0, -1.0)]

    def limit(precision: Any) -> torch.Tensor:
        method = FedSLR(eta_g=0.3, lam=0.05, mu=1.0, lr=0.1, batch_size=30, local_steps=20)
        problem = NeuralProblem(
            lambda: torch.nn.Linear(4, 3, bias=False), loss="mse", dtype=torch.float64
        )
        done = simulate(method, problem, rows, 60, test=0.0, precision=precision, evaluate_every=0)
        model = method.model(problem, done.server)
        return model.params["weight"]

    error = float((limit("bfloat16") - limit("exact")).abs().max())
    assert error < 0.01
