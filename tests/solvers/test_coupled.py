from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize

from parsifl.solvers.coupled import (
    Coupled,
    FixedAnchor,
    density,
    smooth_sign,
    sparsify,
)
from parsifl.solvers.update_rules import soften_

Array = npt.NDArray[np.float64]
RULES = [
    Coupled(rate=2.0, lam=0.3),
    Coupled(rate=0.1, lam=5.0, decay=5.0, gamma=0.2),
    Coupled(rate=2.0, lam=0.3, gamma=0.2, gamma_w=0.05, rho=0.2),
    Coupled(rate=2.0, lam=0.3, decay=0.3, gamma=0.4, gamma_w=0.1, proximal=True),
]


def norm(x: Array, rho: float) -> float:
    """Return rho sum log cosh(x / rho), without overflow."""
    return float((rho * (np.logaddexp(x / rho, -x / rho) - math.log(2))).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smooth_sign_is_tanh_up_to_rounding(dtype: torch.dtype) -> None:
    small = torch.logspace(-30, 3, 2001, dtype=dtype)
    x, eps = torch.cat([-small, torch.zeros(1, dtype=dtype), small]), torch.finfo(dtype).eps
    found, wanted = smooth_sign(x, 0.01).double(), np.tanh(x.double().numpy() / 0.01)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=4 * eps)
    assert found[2001] == 0.0


@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e2))
def test_smoothed_norm_lies_within_rho_log_2_below_the_absolute_value(x: float, rho: float) -> None:
    value = norm(np.array([x]), rho)
    slack = 1e-9 * (abs(x) + rho)
    assert abs(x) - rho * math.log(2) - slack <= value <= abs(x) + slack


@given(st.floats(-5, 5), st.floats(0.05, 5))
def test_smooth_sign_is_the_derivative_of_the_smoothed_norm(x: float, rho: float) -> None:
    step = 1e-4 * rho
    slope = (norm(np.array([x + step]), rho) - norm(np.array([x - step]), rho)) / (2 * step)
    found = smooth_sign(torch.tensor(x, dtype=torch.float64), rho)
    assert float(found) == pytest.approx(slope, abs=1e-6)


@given(hnp.arrays(np.float64, 6, elements=st.floats(-3, 3)), st.floats(0, 2))
def test_soft_threshold_is_the_proximal_operator_of_the_absolute_value(
    x: Array, shrink: float
) -> None:
    found = torch.from_numpy(x.copy())
    soften_(found, shrink)
    grid = np.linspace(-3, 3, 1201)
    for value, got in zip(x, found.tolist(), strict=True):
        costs = 0.5 * (grid - value) ** 2 + shrink * np.abs(grid)
        assert 0.5 * (got - value) ** 2 + shrink * abs(got) <= costs.min() + 1e-12
        assert math.copysign(1.0, got) == 1.0 or got != 0.0  # no negative zeros


@pytest.mark.parametrize("rule", RULES)
def test_step_is_the_one_of_the_papers(rule: Coupled) -> None:
    draw = np.random.default_rng(0)
    theta, w, lr = draw.normal(size=(2, 5)), draw.normal(size=(2, 5)), 0.1
    moved, anchor = torch.from_numpy(theta.copy()), torch.from_numpy(w.copy())
    rule.before_(moved, (anchor,), lr)
    rule.after_(moved, (anchor,), lr)
    gamma, gamma_w = (0.0, 0.0) if rule.proximal else (rule.gamma, rule.gamma_w)
    new = theta - lr * (rule.decay * theta - rule.lam * w + gamma * np.tanh(theta / rule.rho))
    if rule.proximal:
        new = np.sign(new) * np.maximum(np.abs(new) - lr * rule.gamma, 0)
    follow = w - rule.rate * (rule.lam * (w - new) + gamma_w * np.tanh(w / rule.rho))
    if rule.proximal:
        follow = np.sign(follow) * np.maximum(np.abs(follow) - rule.rate * rule.gamma_w, 0)
    np.testing.assert_allclose(moved, new, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(anchor, follow, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_held_rule_makes_the_same_step_and_leaves_the_anchor(rule: Coupled) -> None:
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(1, 5, generator=draw, dtype=torch.float64)
    w = torch.randn(1, 5, generator=draw, dtype=torch.float64)
    moved, held, anchor = theta.clone(), theta.clone(), w.clone()
    rule.before_(moved, (anchor,), 0.1)
    rule.after_(moved, (anchor,), 0.1)
    kept = w.clone()
    FixedAnchor(rule).before_(held, (kept,), 0.1)
    FixedAnchor(rule).after_(held, (kept,), 0.1)
    assert torch.equal(held, moved)
    assert torch.equal(kept, w)
    assert not FixedAnchor(rule).moves_aux


def test_slope_agrees_with_the_step_in_place() -> None:
    rule = RULES[2]
    theta, w = torch.tensor([[0.3, -0.1]]).double(), torch.tensor([[1.0, 2.0]]).double()
    moved = theta.clone()
    rule.before_(moved, (w,), 0.1)
    torch.testing.assert_close((theta - moved) / 0.1, rule.slope(theta, w))


class Quadratic:
    """l(theta) = (theta - c)' H (theta - c) / 2 with the outer function F of the paper."""

    def __init__(self, lam: float, gamma: float = 0.0, gamma_w: float = 0.0) -> None:
        draw = np.random.default_rng(1)
        root = draw.normal(size=(4, 4))
        self.hessian = root @ root.T / 4 + np.eye(4)
        self.centre = draw.normal(size=4)
        self.lam, self.gamma, self.gamma_w, self.rho = lam, gamma, gamma_w, 0.3

    def inner(self, theta: Array, w: Array) -> float:
        gap = theta - self.centre
        loss = 0.5 * gap @ self.hessian @ gap
        return float(loss + self.gamma * norm(theta, self.rho) - self.lam * theta @ w)

    def slope(self, theta: Array, w: Array) -> Array:
        smooth = self.gamma * np.tanh(theta / self.rho)
        slope: Array = self.hessian @ (theta - self.centre) + smooth - self.lam * w
        return slope

    def theta(self, w: Array) -> Array:
        found: Any = minimize(
            self.inner, np.zeros(4), args=(w,), jac=self.slope, method="BFGS",
            options={"gtol": 1e-11, "maxiter": 2000},
        )  # fmt: skip
        solution: Array = found.x
        return solution

    def outer(self, w: Array) -> float:
        penalty = 0.5 * self.lam * w @ w + self.gamma_w * norm(w, self.rho)
        return self.inner(self.theta(w), w) + float(penalty)


def test_proposition_1_gradient_against_finite_differences() -> None:
    """The anchor's step is eta times grad F(w) = lambda (w - theta(w)) + gamma_w tanh(w / rho)."""
    problem = Quadratic(lam=0.5, gamma=0.2, gamma_w=0.1)
    w = np.random.default_rng(2).normal(size=4)
    rule = Coupled(rate=0.7, lam=0.5, gamma=0.2, gamma_w=0.1, rho=problem.rho)
    anchor = torch.from_numpy(w.copy())
    rule.follow_(anchor, torch.from_numpy(problem.theta(w)))
    step = 1e-4
    slopes = [
        (problem.outer(w + step * unit) - problem.outer(w - step * unit)) / (2 * step)
        for unit in np.eye(4)
    ]
    np.testing.assert_allclose((w - anchor.numpy()) / 0.7, slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])
def test_strong_convexity_of_proposition_1_is_tight_on_quadratics(lam: float) -> None:
    """The Hessian of F is lambda I - lambda^2 H^-1: least eigenvalue lambda (mu - lambda) / mu."""
    problem = Quadratic(lam=lam)
    step, origin = 1e-2, np.random.default_rng(3).normal(size=4)
    units = np.eye(4)

    def second(a: Array, b: Array) -> float:
        corners = [
            sign * problem.outer(origin + step * (p * a + q * b))
            for p, q, sign in ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
        ]
        return sum(corners) / (4 * step**2)

    measured = np.array([[second(a, b) for b in units] for a in units])
    exact = lam * np.eye(4) - lam**2 * np.linalg.inv(problem.hessian)
    np.testing.assert_allclose(measured, exact, atol=1e-7)
    mu = np.linalg.eigvalsh(problem.hessian)[0]
    least = np.linalg.eigvalsh(measured)[0]
    assert least == pytest.approx(lam * (mu - lam) / mu, abs=1e-7)


def test_lambda_beyond_the_curvature_makes_the_outer_problem_concave_somewhere() -> None:
    problem = Quadratic(lam=0.0)
    mu = np.linalg.eigvalsh(problem.hessian)[0]
    lam = 1.5 * mu
    exact = lam * np.eye(4) - lam**2 * np.linalg.inv(problem.hessian)
    assert np.linalg.eigvalsh(exact)[0] < 0


models = hnp.arrays(
    np.float64, st.integers(1, 30), elements=st.floats(-2, 2).map(lambda v: v + 0.0)
)


@given(models, st.floats(0, 2), st.floats(0, 1))
def test_sparsify_keeps_what_is_large_and_no_less_than_the_floor(
    values: Array, threshold: float, floor: float
) -> None:
    found = sparsify({"w": torch.from_numpy(values)}, threshold, floor)["w"].numpy()
    kept = found != 0
    assert np.array_equal(found[kept], values[kept])
    assert kept[(np.abs(values) >= threshold) & (values != 0)].all()
    asked = min(math.ceil(floor * values.size), np.count_nonzero(values))
    assert kept.sum() >= asked
    dropped = (values != 0) & ~kept
    if dropped.any() and kept.any():
        assert np.abs(values[dropped]).max() < np.abs(values[kept]).min()
    assert not np.signbit(found[found == 0]).any()


def test_floor_is_taken_over_the_whole_model_not_each_leaf() -> None:
    params = {"a": torch.tensor([5.0, 4.0]), "b": torch.tensor([0.1, 0.2])}
    found = sparsify(params, threshold=10.0, floor=0.5)
    assert found["a"].tolist() == [5.0, 4.0]
    assert found["b"].tolist() == [0.0, 0.0]
    assert float(density(found)) == 0.5


def test_zero_threshold_is_the_identity() -> None:
    params = {"a": torch.tensor([1e-30, 0.0])}
    assert sparsify(params, 0.0, 0.5) is params


def test_sparsify_runs_under_vmap() -> None:
    stack = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    batched = torch.func.vmap(lambda w: sparsify({"w": w}, 5.0, 0.25)["w"])(stack)
    alone = torch.stack([sparsify({"w": w}, 5.0, 0.25)["w"] for w in stack])
    assert torch.equal(batched, alone)


def test_sparsify_leaves_what_is_not_a_number() -> None:
    values = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    for floor in (0.0, 0.5, 1.0):
        assert sparsify({"w": values}, 2.5, floor)["w"].isnan().any()


def test_sparsify_keeps_exempt_entries_beyond_the_floor() -> None:
    params = {"w": torch.tensor([[0.1, 3.0, 2.0], [0.2, -1.0, 4.0]])}
    found = sparsify(params, 100.0, 0.25, {"w": (0,)})["w"]
    assert found.tolist() == [[pytest.approx(0.1), 0.0, 0.0], [pytest.approx(0.2), 0.0, 4.0]]
