"""The search from gradients: the supports and estimates of the search from curvatures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parsifl.core.algorithm import ClientUpdate
from parsifl.linear.glm import GLM
from parsifl.sites.estimators.exact import ExactFit, Sites, exact_fit
from parsifl.sites.families.cox import Cox
from parsifl.sites.search.fedbestsubset import FedBestSubset
from parsifl.sites.search.subset_state import Phase

K = 4


def rows(family: str, seed: int, n: int = 150, p: int = 20) -> tuple[Any, Any, list[Any]]:
    """Return four sites with correlated columns, of which four have an effect."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(4 * n, p)) + 0.7 * draw.normal(size=(4 * n, 1))
    x = (x - x.mean(0)) / x.std(0)
    u = x[:, :K] @ np.array([0.8, -0.6, 0.5, -0.7])
    if family == "logistic":
        y = (draw.random(len(u)) < 1 / (1 + np.exp(-u))).astype(float)
    elif family == "poisson":
        y = draw.poisson(np.exp(0.5 * u)).astype(float)
    else:
        time, end = draw.exponential(np.exp(-u)), draw.exponential(2, len(u))
        y = np.column_stack([np.minimum(time, end), time < end]).astype(float)
    return x, y, [np.arange(i * n, (i + 1) * n) for i in range(4)]


def fitted(family: str, seed: int, tau: int = K, keep: Any = (), **settings: Any) -> ExactFit:
    x, y, parts = rows(family, seed)
    problem: Any = Cox(x.shape[1], keep=keep)
    start = np.zeros(x.shape[1])
    if family != "cox":
        problem = GLM(x.shape[1], family, intercept=True, keep=keep)
        mean = y.mean()
        start = np.append(start, np.log(mean / (1 - mean)) if family == "logistic" else 0.0)
    algorithm = FedBestSubset(tau, **settings)
    return exact_fit(algorithm, problem, Sites.of(x, torch.as_tensor(y), parts), start, rounds=60)


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_find_the_support_of_curvatures(family: str, seed: int) -> None:
    exact, fit = fitted(family, seed), fitted(family, seed, gradients=True)
    assert fit.search.phase == Phase.CONVERGED
    assert fit.columns.tolist() == exact.columns.tolist()
    assert np.allclose(fit.search.coefficients, exact.search.coefficients, atol=1e-3)
    assert fit.search.loss == pytest.approx(exact.search.loss, abs=1e-4)
    assert np.allclose(fit.information, exact.information, rtol=0.02, atol=0.02)
    assert np.allclose(fit.gradients.sum(0), 0, atol=1e-8)  # one Newton step, of sites' models
    assert np.allclose(fit.gradients, exact.gradients, atol=0.1)
    assert np.allclose(fit.losses, exact.losses, atol=1e-2)


@pytest.mark.parametrize("family", ["logistic", "cox"])
def test_most_answers_are_gradients(family: str) -> None:
    fit = fitted(family, 0, gradients=True)
    sent = np.array([record["bytes_up"] for record in fit.history])
    products = sent > sent.min()
    assert products[-1]  # the request for the errors repeats the last one of the search
    assert products.sum() <= 3
    assert len(sent) < 16


def test_a_fixed_model_needs_gradients_and_one_curvature() -> None:
    exact = fitted("logistic", 0, tau=0, keep=(0, 1, 7))
    fit = fitted("logistic", 0, tau=0, keep=(0, 1, 7), gradients=True)
    assert fit.columns.tolist() == [0, 1, 7, 20]
    assert np.allclose(fit.search.coefficients, exact.search.coefficients, atol=1e-4)
    assert len(fit.history) < 12


@pytest.mark.parametrize("seed", range(4))
def test_noise_changes_estimates_by_a_fraction_of_their_errors(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, draw = 0.03, np.random.default_rng(seed)
    answer = FedBestSubset.client_update

    def noisy(self: Any, problem: Any, received: Any, state: None, data: Any) -> Any:
        sums = answer(self, problem, received, state, data).upload

        def near(values: Any, largest: float) -> Any:
            return values + width * largest * torch.as_tensor(draw.random(values.shape) - 0.5)

        upload = replace(
            sums,
            loss=near(sums.loss, 4.0),
            gradient=near(sums.gradient, 4.0),  # residuals below 1, columns below 4
            diagonal=near(sums.diagonal, 4.0),
            curvature=near(sums.curvature, 4.0),
        )
        return ClientUpdate(None, upload)

    exact = fitted("logistic", seed)
    monkeypatch.setattr(FedBestSubset, "client_update", noisy)
    fit = fitted("logistic", seed, gradients=True, noise=width)
    assert fit.columns.tolist() == exact.columns.tolist()
    error = np.sqrt(np.diag(np.linalg.inv(exact.information.sum(0))))
    step = fit.search.coefficients - exact.search.coefficients
    assert (np.abs(step[exact.columns]) < 0.05 * error).all()
    assert np.allclose(np.sqrt(np.diag(np.linalg.inv(fit.information.sum(0)))), error, rtol=0.02)
    assert len(fit.history) < 30
