from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import sparse
from torch import Tensor

from parsifl.linear.datafits import DATAFITS
from parsifl.linear.design import CsrDesign
from parsifl.linear.sums import best_intercept, glm_sums, upper

CANDIDATES = torch.tensor([0, 2, 4])


def _rows(family: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    u = x[:, 0] - 0.5 * x[:, 2]
    if family == "logistic":
        y = (torch.rand(30, generator=draw) < torch.sigmoid(u)).double()
    elif family == "poisson":
        y = torch.poisson(torch.exp(u), generator=draw)
    else:
        y = u + torch.randn(30, generator=draw, dtype=torch.float64)
    return x, y, torch.rand(30, generator=draw, dtype=torch.float64) + 0.5


def _same(sums: Any, loss: Any, at: Tensor, places: Tensor) -> None:
    at = at.clone().requires_grad_()
    torch.testing.assert_close(sums.loss, loss(at).detach())
    slope = torch.autograd.functional.jacobian(loss, at)  # type: ignore[no-untyped-call]  # torch
    bend = torch.autograd.functional.hessian(loss, at)  # type: ignore[no-untyped-call]  # torch
    torch.testing.assert_close(sums.gradient, slope, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(sums.diagonal, bend.diagonal(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(sums.curvature, upper(bend[places][:, places]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", ["squared-half", "squared", "logistic", "poisson"])
def test_sums_are_the_derivatives_of_the_loss(family: str) -> None:
    x, y, weight = _rows(family)
    fit = DATAFITS.find(family)
    at = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.4], dtype=torch.float64)

    def loss(b: Tensor) -> Tensor:
        return (weight * fit.loss(x @ b[:-1] + b[-1], y)).sum()

    sums = glm_sums(fit, x, y, weight, at, CANDIDATES, intercept=True)
    _same(sums, loss, at, CANDIDATES)
    csr = CsrDesign(sparse.csr_matrix(x.numpy()))
    again = glm_sums(fit, csr, y, weight, at, CANDIDATES, intercept=True)
    torch.testing.assert_close(again.curvature, sums.curvature)
    torch.testing.assert_close(again.gradient, sums.gradient)
    torch.testing.assert_close(again.diagonal, sums.diagonal)


@pytest.mark.parametrize("family", ["squared-half", "logistic", "poisson"])
def test_an_own_intercept_is_profiled_out(family: str) -> None:
    x, y, weight = _rows(family)
    fit = DATAFITS.find(family)
    at = torch.tensor([0.3, -0.2, 0.1, 0.0, 9.0], dtype=torch.float64)
    sums = glm_sums(fit, x, y, weight, at, CANDIDATES, intercept=True, own_intercept=True)
    step = 1e-5

    def profiled(b: Tensor) -> Tensor:
        u = x @ b[:4]
        return (weight * fit.loss(u + best_intercept(fit, u, y, weight), y)).sum()

    torch.testing.assert_close(sums.loss, profiled(at))
    for place in range(4):
        move = torch.zeros_like(at)
        move[place] = step
        slope = (profiled(at + move) - profiled(at - move)) / (2 * step)
        torch.testing.assert_close(sums.gradient[place], slope, rtol=1e-6, atol=1e-6)
        bend = (profiled(at + move) - 2 * profiled(at) + profiled(at - move)) / step**2
        torch.testing.assert_close(sums.diagonal[place], bend, rtol=1e-3, atol=1e-3)
    assert sums.gradient[4] == sums.diagonal[4] == 0


def test_a_site_with_one_class_keeps_a_finite_intercept_and_says_nothing() -> None:
    x, _, weight = _rows("logistic")
    ones = torch.ones(30, dtype=torch.float64)
    at = torch.zeros(5, dtype=torch.float64)
    sums = glm_sums(
        DATAFITS.find("logistic"),
        x,
        ones,
        weight,
        at,
        CANDIDATES,
        intercept=True,
        own_intercept=True,
    )
    assert float(sums.loss) < 1e-9
    assert float(sums.gradient.abs().max()) < 1e-9
    none = best_intercept(DATAFITS.find("poisson"), x[:, 0], 0 * ones, weight)
    assert -31 < float(none) < -25


def test_a_poisson_step_too_far_stays_finite() -> None:
    fit = DATAFITS.find("poisson")
    u = torch.tensor([49.0, 50.0, 51.0, 1e6], dtype=torch.float64)
    assert bool(torch.isfinite(fit.loss(u, torch.ones(4))).all())
    assert bool((fit.loss(u, torch.ones(4)).diff() > 0).all())
