from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.algorithms import personal
from tests.reference_personal import MetaStep, gradient, meta_rounds

from parsifl.algorithms.perfedavg import PerFedAvg
from parsifl.core.errors import ConfigError

BASE: dict[str, Any] = {"lr": 0.2, "adapt_lr": 0.3, "batch_size": 3, "local_steps": 4}


def reference(method: PerFedAvg) -> MetaStep:
    delta = method.delta if method.variant == "hessian-free" else 0.0
    return MetaStep(method.adapt_lr, method.lr, method.batch_size, delta)


@pytest.mark.parametrize("engine", personal.ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        BASE,
        personal.by_epochs(BASE, 2.0),
        {**BASE, "variant": "hessian-free", "delta": 1e-2},
        {**BASE, "batch_size": 6},  # two parts are more rows than the smallest client has
    ],
)
def test_rounds_match_the_papers_equations(settings: dict[str, Any], engine: Any) -> None:
    method = PerFedAvg(**settings)
    weights = np.array([len(part) for part in personal.DATA.train], float)
    expected = meta_rounds(
        reference(method), personal.start(), personal.cohorts(), personal.draws(method), weights
    )
    found = personal.array(personal.run(method, engine).server)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_hessian_free_step_approaches_the_true_meta_gradient() -> None:
    """With D = D' = D'' the direction is the gradient of w -> f(w - alpha grad f(w))."""
    rows = personal.draws(PerFedAvg(**BASE))(0, 1)[0]
    alpha, start = 0.3, personal.start()

    def loss(w: Any) -> float:
        moved = w - alpha * gradient(w, rows)
        logits = rows.x @ moved[:, :-1].T + moved[:, -1]
        chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return float(-np.log(chance[np.arange(len(rows.y)), rows.y]).mean())

    direction = np.random.default_rng(0).normal(size=start.shape)
    step = 1e-5
    slope = (loss(start + step * direction) - loss(start - step * direction)) / (2 * step)
    v = gradient(start - alpha * gradient(start, rows), rows)
    delta = 1e-4
    difference = gradient(start + delta * v, rows) - gradient(start - delta * v, rows)
    meta = v - alpha * difference / (2 * delta)
    assert (meta * direction).sum() == pytest.approx(slope, rel=1e-6)
    assert abs((v * direction).sum() - slope) > 1e-3  # first order leaves something out


def test_variants_differ() -> None:
    first = personal.array(personal.run(PerFedAvg(**BASE)).server)
    second = personal.array(personal.run(PerFedAvg(**BASE, variant="hessian-free")).server)
    assert np.abs(first - second).max() > 1e-4


def test_personal_model_is_adapted_to_training_rows() -> None:
    method = PerFedAvg(**BASE, adapt_steps=2)
    done = personal.run(method)
    pooled = np.asarray(personal.DATA.x)
    training = {tuple(row) for row in pooled[np.asarray(personal.DATA.train[3])].tolist()}
    w = personal.array(done.server)
    for rows in personal.tuning(method, 3, "adapt"):
        assert {tuple(row) for row in rows.x.tolist()} <= training
        w = w - method.adapt_lr * gradient(w, rows)
    np.testing.assert_allclose(personal.array(done.personal(3).params), w, rtol=1e-12, atol=1e-12)


def test_no_steps_leave_the_model_where_it_was() -> None:
    found = personal.array(personal.run(PerFedAvg(**{**BASE, "local_steps": 0})).server)
    np.testing.assert_allclose(found, personal.start())


def test_work_is_counted() -> None:
    """Two gradients a step are four times the products of a forward pass, and more."""
    record = personal.run(PerFedAvg(**BASE)).metrics[0]
    assert record["flops"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last_batch": "pad"}, "last_batch"),
        ({"momentum": 0.5}, "momentum"),
        ({"delta": 0.0}, "PerFedAvg.delta"),
        ({"adapt_lr": 0.0}, "PerFedAvg.adapt_lr"),
        ({"variant": "exact"}, "PerFedAvg.variant"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PerFedAvg(**settings)
