from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import personal
from tests.reference_personal import attentive_rounds, distance_attention

from parsifl.algorithms.fedamp import FedAMP
from parsifl.algorithms.local import Local
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key

BASE: dict[str, Any] = {
    "lr": 0.2, "lam": 1.0, "alpha": 0.8, "sigma": 4.0, "batch_size": 4, "local_steps": 5,
}  # fmt: skip


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize("settings", [BASE, personal.by_epochs({**BASE, "start": "cloud"}, 1.0)])
def test_rounds_match_the_papers_equations(settings: dict[str, Any], engine: Any) -> None:
    method = FedAMP(**settings)
    models, clouds = attentive_rounds(
        lambda w: distance_attention(w, method.alpha, method.sigma),
        method.lam / method.alpha,
        method.lr,
        personal.start(),
        len(personal.SIZES),
        personal.cohorts(),
        personal.draws(method),
        from_cloud=method.start == "cloud",
    )
    done = personal.run(method, engine)
    np.testing.assert_allclose(personal.array(done.server.models), models, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(personal.array(done.server.clouds), clouds, rtol=1e-12, atol=1e-12)
    for client in {i for cohort in personal.cohorts() for i in cohort}:
        found = personal.array(done.personal(client).params)
        np.testing.assert_allclose(found, models[client], rtol=1e-12, atol=1e-12)


def test_each_client_is_sent_its_own_mixture() -> None:
    method = FedAMP(**BASE)
    server = personal.run(method).server
    for info in personal.INFOS:
        down = method.broadcast(personal.PROBLEM, server, info, Key(0))
        assert torch.equal(down["weight"], server.clouds["weight"][info.id])
    assert not torch.equal(server.clouds["weight"][0], server.clouds["weight"][1])


def test_attention_rows_sum_to_one_and_near_models_weigh_more() -> None:
    models = torch.tensor([[0.0, 0.0], [0.1, 0.0], [3.0, 0.0]], dtype=torch.float64)
    xi = FedAMP(alpha=1.0, sigma=2.0).attention(models)
    torch.testing.assert_close(xi.sum(1), torch.ones(3, dtype=torch.float64))
    assert xi[0, 1] > xi[0, 2] > 0
    torch.testing.assert_close(xi, xi.T)


def test_no_pull_and_own_start_is_training_alone() -> None:
    shared: dict[str, Any] = {"lr": 0.2, "batch_size": 4, "local_steps": 5}
    attentive, alone = personal.run(FedAMP(**shared, lam=0.0)), personal.run(Local(**shared))
    for client in range(len(personal.SIZES)):
        left, right = attentive.personal(client).params, alone.personal(client).params
        np.testing.assert_allclose(personal.array(left), personal.array(right), rtol=1e-12)


def test_there_is_no_global_model() -> None:
    assert "global" not in personal.run(FedAMP(**BASE)).metrics[-1]


def test_mixture_that_is_not_convex_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"alpha \(N - 1\) / sigma = 1.25 with N = 5"):
        personal.run(FedAMP(alpha=1.25, sigma=4.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 0.0}, "FedAMP.sigma"),
        ({"alpha": -1.0}, "FedAMP.alpha"),
        ({"lam": 100.0, "alpha": 1.0}, "diverge"),
        ({"start": "zero"}, "FedAMP.start"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedAMP(**settings)
