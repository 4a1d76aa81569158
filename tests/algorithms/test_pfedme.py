from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.algorithms import personal
from tests.reference_personal import Coupling, coupled_rounds

from parsifl.algorithms.pfedme import PFedMe
from parsifl.core import tree
from parsifl.core.errors import ConfigError
from parsifl.core.registry import get

BASE: dict[str, Any] = {"lr": 0.1, "outer_lr": 0.02, "lam": 10.0, "batch_size": 4, "local_steps": 4}


def reference(method: PFedMe) -> Coupling:
    return Coupling(
        eta=method.outer_lr,
        eta_p=method.lr,
        lam=method.lam,
        distance=True,
        gamma=method.gamma,
        rho=method.rho,
        inner=method.inner,
        nu=method.accuracy,
        proximal=method.l1 == "proximal",
    )


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {**BASE, "inner": 1},
        {**BASE, "inner": 5},
        {**BASE, "inner": 5, "beta": 2.0},
        {**BASE, "inner": 1, "gamma": 0.1, "rho": 0.05},
        {**BASE, "inner": 4, "gamma": 0.1, "l1": "proximal"},
        personal.by_epochs({**BASE, "inner": 8, "accuracy": 0.5}, 1.0),
        {**BASE, "inner": 1, "gamma": 0.1, "rho": 0.05, "threshold": 0.2, "floor": 0.5},
    ],
)
def test_rounds_match_the_papers_equations(settings: dict[str, Any], engine: Any) -> None:
    method = PFedMe(**settings)
    expected = coupled_rounds(
        reference(method),
        personal.start(),
        personal.cohorts(),
        personal.draws(method),
        beta=method.beta,
        threshold=method.threshold,
        floor=method.floor,
    )
    found = personal.array(personal.run(method, engine).server)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_personal_model_is_theta_and_not_the_local_global_model() -> None:
    method = PFedMe(**BASE)
    done = personal.run(method)
    server = personal.array(done.server)
    theta, anchor = reference(method).client(server, personal.tuning(method, 0, "train"))
    found = personal.array(done.personal(0).params)
    np.testing.assert_allclose(found, theta, rtol=1e-12, atol=1e-12)
    assert np.abs(found - anchor).max() > 1e-3


def test_many_inner_steps_solve_the_moreau_subproblem() -> None:
    """At a solution the gradient of l(theta) + (lambda / 2) |theta - w|^2 vanishes."""
    rule = Coupling(eta=0.02, eta_p=0.1, lam=10.0, distance=True, inner=200)
    rows = personal.draws(PFedMe(**BASE))(0, 1)[:1]
    theta, _ = rule.client(personal.start(), rows)
    assert np.abs(rule.slope(theta, personal.start(), rows[0])).max() < 1e-12


@pytest.mark.bits
def test_everyone_training_equals_the_cohort_training_bit_for_bit() -> None:
    runs = [personal.run(PFedMe(**BASE, trains=trains)) for trains in ("cohort", "everyone")]
    assert tree.same(runs[0].server, runs[1].server)


def test_it_is_registered_under_its_usual_name() -> None:
    assert isinstance(get("pFedMe"), PFedMe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_lr": 1.0}, "outer_lr \\* lam = 15"),
        ({"lr": 0.2}, "lr \\* lam = 3 must be below 2"),
        ({"lam": -1.0}, "PFedMe.lam"),
        ({"accuracy": -1.0}, "PFedMe.accuracy"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PFedMe(**settings)
