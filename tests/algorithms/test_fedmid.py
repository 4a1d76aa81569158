"""FedMid and FedDualAvg against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import sparse
from tests.reference_sparse import fed_dual_avg, fed_mid, hard, soft

from parsifl.algorithms.feddualavg import FedDualAvg
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.algorithms.fedmid import FedMid
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ConfigError
from parsifl.linear.glm import GLM


def test_fedmid_follows_its_paper() -> None:
    pooled = sparse.data(sparse.clients())
    method = FedMid(lr=0.05, batch_size=4, local_steps=3, lam=0.3, server_lr=0.8)
    drawn = sparse.draws(method, GLM(sparse.WIDTH), pooled, 4, "train")
    expected = fed_mid(sparse.rows_of(pooled), drawn, 0.05, 0.8, 0.3)
    found = sparse.trained(method, pooled, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    assert 0 < int((found == 0).sum()) < sparse.WIDTH


@pytest.mark.parametrize("prox", ["l1", "hard"])
def test_feddualavg_follows_its_paper(prox: Any) -> None:
    pooled = sparse.data(sparse.clients())
    method = FedDualAvg(
        lr=0.05, batch_size=4, local_steps=3, lam=0.3, server_lr=0.8, tau=3, prox=prox
    )
    drawn = sparse.draws(method, GLM(sparse.WIDTH), pooled, 4, "train")
    if prox == "l1":
        expected = fed_dual_avg(
            sparse.rows_of(pooled), drawn, 0.05, 0.8, lambda z, h: soft(z, 0.3 * h)
        )
    else:
        expected = fed_dual_avg(sparse.rows_of(pooled), drawn, 0.05, 0.8, lambda z, _: hard(z, 3))
    found = sparse.trained(method, pooled, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [FedMid, FedDualAvg])
@pytest.mark.parametrize("prox", ["l1", "hard"])
def test_batched_is_sequential(kind: type[FedMid], prox: Any) -> None:
    pooled = sparse.data(sparse.clients())
    problem = GLM(sparse.WIDTH, intercept=True)
    sparse.same_batched(kind(lr=0.05, batch_size=4, prox=prox, tau=3), pooled, 3, problem=problem)


def test_fedmid_with_a_hard_prox_is_fediterht() -> None:
    pooled = sparse.data(sparse.clients())
    mid = sparse.trained(FedMid(lr=0.05, batch_size=4, prox="hard", tau=3), pooled, 3)
    other = sparse.trained(FedIterHT(lr=0.05, batch_size=4, tau=3), pooled, 3)
    torch.testing.assert_close(mid, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [FedMid, FedDualAvg])
def test_no_local_steps_change_nothing(kind: type[FedMid]) -> None:
    found = sparse.trained(kind(local_steps=0), sparse.data(sparse.clients()), 2)
    assert not found.any()


def test_an_intercept_is_not_shrunk() -> None:
    draw = np.random.default_rng(0)
    made = [(draw.standard_normal((20, 3)), np.full(20, 5.0)) for _ in range(2)]
    problem = GLM(3, intercept=True)
    for method in (
        FedMid(lr=0.05, lam=2.0, local_steps=200),
        FedDualAvg(lr=0.05, lam=2.0, local_steps=200),
    ):
        found = sparse.trained(method, sparse.data(made), 2, problem=problem)
        assert float(found[-1]) == pytest.approx(5.0, abs=1e-3)
        assert not found[:-1].any()


@pytest.mark.parametrize("kind", [FedMid, FedDualAvg])
def test_full_batches_hold_all_rows(kind: type[FedMid]) -> None:
    client = ClientInfo(0, 40)
    assert kind(batch_size=4).batches(client, 0).batches["train"].rows(40) == 4
    assert kind(full_batch=True).batches(client, 0).batches["train"].rows(40) == 40


def test_fedmid_refuses_epochs() -> None:
    with pytest.raises(ConfigError, match="epochs=1; set local_steps instead"):
        FedMid(epochs=1.0)


def test_fedmid_takes_the_same_number_of_steps_on_every_device() -> None:
    """Its server shrinks by K local steps; `epochs` is rejected for the same reason."""
    for profile in ({"local_steps": 7}, {"epochs": 3.0}):
        spec = FedMid(local_steps=5).batches(ClientInfo(0, 40, profile), 0).batches["train"]
        assert (spec.steps, spec.epochs) == (5, None)
    assert FedMid().profile_fields() == ()


def test_feddualavg_refuses_momentum() -> None:
    with pytest.raises(ConfigError, match=r"momentum = 0.9: FedDualAvg takes plain steps"):
        FedDualAvg(momentum=0.9)
