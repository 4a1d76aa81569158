"""Fed-HT against NumPy, on dense, CSR and neural problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tests.algorithms import sparse
from tests.reference_sparse import fed_ht
from torch import nn

from parsifl.algorithms.distributediht import DistributedIHT
from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.algorithms.fedmid import FedMid
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ConfigError, DroppedClientWarning
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

BOTH = [
    FedHT(lr=0.05, batch_size=4, local_steps=3, tau=3),
    FedIterHT(lr=0.05, batch_size=4, local_steps=3, tau=3),
]


@pytest.mark.parametrize("method", BOTH, ids=lambda m: type(m).__name__)
def test_it_follows_the_paper(method: FedHT | FedIterHT) -> None:
    pooled = sparse.data(sparse.clients())
    drawn = sparse.draws(method, GLM(sparse.WIDTH), pooled, 4, "train")
    local = isinstance(method, FedIterHT)
    expected = fed_ht(sparse.rows_of(pooled), drawn, tau=3, lr=0.05, local=local)
    found = sparse.trained(method, pooled, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    assert int((found != 0).sum()) == 3


@pytest.mark.parametrize("method", BOTH, ids=lambda m: type(m).__name__)
def test_batched_is_sequential(method: FedHT | FedIterHT) -> None:
    sparse.same_batched(method, sparse.data(sparse.clients()), 3)


@pytest.mark.parametrize("method", BOTH, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", ["squared", "logistic", "softmax"])
def test_csr_is_dense(method: FedHT | FedIterHT, kind: str) -> None:
    draw = np.random.default_rng(0)
    made = []
    for _ in range(3):
        z = draw.standard_normal((10, 30)) * (draw.random((10, 30)) < 0.1)
        y = z[:, 0] if kind == "squared" else draw.integers(0, 3 if kind == "softmax" else 2, 10)
        made.append((z, y))
    classes = 3 if kind == "softmax" else None
    problem = GLM(30, kind, classes=classes, l2=0.1, intercept=True, keep=(5,))
    dense = ClientData.of(made, test=0.0)
    csr = ClientData.of([(sp.csr_matrix(z), y) for z, y in made], test=0.0)
    expected = sparse.trained(method, dense, 4, problem=problem)
    found = sparse.trained(method, csr, 4, problem=problem)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["squared", "softmax"])
@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.2},
        {"density": 0.2, "scope": "row"},
        {"groups": 4, "tau": 3, "scope": "row"},
        {"groups": 4, "density": 0.3, "scope": "layer"},
        {"tau": 2, "spare_vectors": True},
    ],
    ids=str,
)
def test_every_limit_is_the_same_over_csr_and_dense_rows(
    settings: dict[str, Any], kind: str
) -> None:
    draw = np.random.default_rng(0)
    made = []
    for fraction in (0.2, 0.1, 0.0):  # the last client's rows are zero
        z = draw.standard_normal((10, 40)) * (draw.random((10, 40)) < fraction)
        made.append((z, z[:, 0] if kind == "squared" else draw.integers(0, 3, 10)))
    classes = 3 if kind == "softmax" else None
    start = draw.standard_normal((3, 40) if classes else 40)  # from zero, classes would tie
    problem = GLM(40, kind, classes=classes, keep=(5,), start=start)
    method = FedIterHT(lr=0.1, local_steps=3, batch_size=4, **settings)
    dense = ClientData.of(made, test=0.0)
    csr = ClientData.of([(sp.csr_matrix(z), y) for z, y in made], test=0.0)
    expected = sparse.trained(method, dense, 4, problem=problem)
    found = sparse.trained(method, csr, 4, problem=problem)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_csr_uploads_only_columns_that_occur() -> None:
    z = sp.csr_matrix(([1.0] * 8, (range(8), [3, 3, 9, 9, 9, 2, 2, 2])), shape=(8, 100_000))
    pooled = ClientData.of([(z, np.arange(8.0))], test=0.0)
    run = simulate(FedHT(lr=0.1, tau=2), GLM(100_000), pooled, 1, evaluate_every=0)
    assert run.bytes_up < 200
    assert run.model.params["coef"].nonzero()[:, 0].tolist() == [2, 9]


def test_distributed_iht_is_fed_ht_with_one_step() -> None:
    pooled = sparse.data(sparse.clients())
    one = sparse.trained(DistributedIHT(lr=0.05, batch_size=4, tau=3), pooled, 5)
    other = sparse.trained(FedHT(lr=0.05, batch_size=4, local_steps=1, tau=3), pooled, 5)
    assert torch.equal(one, other)
    with pytest.raises(ConfigError, match="steps"):
        DistributedIHT(local_steps=2)


@pytest.mark.parametrize("kind", [FedHT, FedIterHT, DistributedIHT])
def test_no_local_steps_change_nothing(kind: type[FedHT]) -> None:
    pooled = sparse.data(sparse.clients())
    problem = NeuralProblem(lambda: nn.Linear(sparse.WIDTH, 1), loss="mse", dtype=torch.float64)
    method = kind(local_steps=0, tau=4)
    start = simulate(method, problem, pooled, 1, evaluate_every=0).server
    later = simulate(method, problem, pooled, 3, evaluate_every=0).server
    for name in start:
        torch.testing.assert_close(start[name], later[name], rtol=1e-15, atol=0)


@pytest.mark.parametrize("scope", ["all", "layer", "row"])
@pytest.mark.parametrize("kind", [FedHT, FedIterHT])
def test_neural_problems_are_thresholded_too(kind: type[FedHT], scope: Any) -> None:
    draw = np.random.default_rng(0)
    made = [(draw.standard_normal((12, 6)), draw.integers(0, 2, 12)) for _ in range(3)]
    problem = NeuralProblem(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), dtype=torch.float64
    )
    method = kind(lr=0.1, batch_size=4, local_steps=3, density=0.5, scope=scope)
    runs = [simulate(method, problem, made, 2, executor=engine) for engine in ("loop", "fused")]
    assert not runs[1].metrics[-1]["notes"]
    for name, value in runs[0].server.items():
        torch.testing.assert_close(value, runs[1].server[name], rtol=1e-12, atol=1e-12)
    total = sum(v.numel() for v in runs[0].server.values())
    kept = sum(int((v != 0).sum()) for v in runs[0].server.values())
    if scope == "all":
        assert kept == -(-total // 2)
    else:
        assert int((runs[0].server["0.weight"] != 0).sum()) == 15


def test_batches_grow_until_they_hold_everything() -> None:
    info = ClientInfo(0, 40)
    method = FedHT(batch_size=10, batch_growth=2.0)
    sizes = [method.batches(info, round).batches["train"].rows(40) for round in range(4)]
    assert sizes == [10, 20, 40, 40]
    assert FedHT(full_batch=True).batches(info, 0).batches["train"].rows(40) == 40


def test_batches_that_grow_do_not_overflow() -> None:
    info = ClientInfo(0, 40)
    for growth, round in ((2.0, 1024), (1.1, 7500), (1.5, 10**9)):
        method = FedHT(batch_size=10, batch_growth=growth)
        assert method.batches(info, round).batches["train"].rows(40) == 40
    assert FedHT(batch_growth=0.5).batches(info, 10**6).batches["train"].batch_size == 1


@pytest.mark.parametrize("engine", ["loop", "fused"])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_momentum_survives_a_budget_over_all_tensors(local_steps: int, engine: Any) -> None:
    """Where everything is kept, thresholding changes nothing, and scope has no effect."""
    draw = np.random.default_rng(0)
    made = [(draw.standard_normal((12, 6)), draw.integers(0, 2, 12)) for _ in range(3)]
    problem = NeuralProblem(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), dtype=torch.float64
    )
    settings: dict[str, Any] = {
        "lr": 0.1, "batch_size": 4, "local_steps": local_steps, "tau": 1000, "momentum": 0.9,
        "weight_decay": 0.1,
    }  # fmt: skip
    found = [
        simulate(FedIterHT(scope=scope, **settings), problem, made, 2, executor=engine).server
        for scope in ("all", "layer")
    ]
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-12, atol=1e-13)


def test_distributed_iht_takes_one_step_on_every_device() -> None:
    with pytest.raises(ConfigError, match="takes one step per round"):
        DistributedIHT(epochs=2.0)
    method = DistributedIHT()
    for profile in ({}, {"local_steps": 7}, {"epochs": 3.0}):
        spec = method.batches(ClientInfo(0, 40, profile), 0).batches["train"]
        assert (spec.steps, spec.epochs) == (1, None)
    assert method.profile_fields() == ()


@pytest.mark.parametrize("method", [FedIterHT, FedMid])
@pytest.mark.parametrize("scope", ["row", "layer", "all"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_client_that_diverged_is_dropped_and_not_thresholded(
    method: Any, scope: Any, engine: Any
) -> None:
    draw = np.random.default_rng(0)
    rows = [(x, x @ [1.0, -2.0, 0, 0, 3.0]) for x in draw.standard_normal((3, 30, 5))]
    rows[1] = (1e6 * rows[1][0], rows[1][1])
    choice = {"prox": "hard"} if method is FedMid else {}
    algorithm = method(
        tau=3, scope=scope, lr=0.05, local_steps=100, momentum=0.5, full_batch=True, **choice
    )
    with pytest.warns(DroppedClientWarning, match="Client 1 diverged"):
        run = simulate(algorithm, GLM(5), rows, 1, test=0.0, executor=engine)
    assert list(run.records[0].dropped) == [1]
