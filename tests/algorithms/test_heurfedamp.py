from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms import personal
from tests.reference_personal import anchored_rounds, angle_attention, attentive_rounds

from parsifl.algorithms.heurfedamp import HeurFedAMP
from parsifl.core.errors import ConfigError

BASE: dict[str, Any] = {
    "lr": 0.2,
    "lam": 1.0,
    "sigma": 3.0,
    "own": 0.4,
    "batch_size": 4,
    "local_steps": 5,
}


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize("settings", [BASE, {**BASE, "start": "cloud"}])
def test_rounds_match_the_papers_equations(settings: dict[str, Any], engine: Any) -> None:
    method = HeurFedAMP(**settings)
    models, clouds = attentive_rounds(
        lambda w: angle_attention(w, method.own, method.sigma),
        method.lam,
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


@pytest.mark.parametrize("engine", personal.ENGINES)
def test_one_iteration_per_mini_batch_matches_a_reference(engine: Any) -> None:
    method = HeurFedAMP(**BASE, outer_lr=0.3)
    thetas, clouds = anchored_rounds(
        lambda w: angle_attention(w, method.own, method.sigma),
        method.lam,
        method.lr,
        0.3,
        personal.start(),
        len(personal.SIZES),
        personal.cohorts(),
        personal.draws(method),
    )
    done = personal.run(method, engine)
    np.testing.assert_allclose(personal.array(done.server.clouds), clouds, rtol=1e-12, atol=1e-12)
    for client, theta in enumerate(thetas):
        found = personal.array(done.personal(client).params)
        np.testing.assert_allclose(found, theta, rtol=1e-12, atol=1e-12)


@given(st.integers(2, 6), st.floats(0.0, 1.0), st.floats(0.1, 500.0))
def test_attention_rows_sum_to_one(clients: int, own: float, sigma: float) -> None:
    draw = np.random.default_rng(clients)
    models = torch.from_numpy(draw.normal(size=(clients, 7)))
    xi = HeurFedAMP(own=own, sigma=sigma).attention(models)
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64))
    torch.testing.assert_close(xi.diagonal(), torch.full((clients,), own, dtype=torch.float64))
    assert bool((xi >= 0).all())


def test_a_single_client_keeps_its_own_model() -> None:
    assert HeurFedAMP().attention(torch.ones(1, 4)).tolist() == [[1.0]]


def test_models_of_zero_length_are_no_nan() -> None:
    xi = HeurFedAMP(own=0.5).attention(torch.zeros(3, 4))
    torch.testing.assert_close(xi, torch.eye(3) * 0.25 + 0.25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own": 1.5}, "HeurFedAMP.own"),
        ({"sigma": -1.0}, "HeurFedAMP.sigma"),
        ({"lam": 40.0}, "diverge"),
        ({"lam": 1.0, "outer_lr": 2.5}, "outer_lr"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeurFedAMP(**settings)
