"""FedMac's statements as numerical tests; where the print is wrong, the smallest counter-example.

Quadratic clients l_i(theta) = |A_i theta - b_i|^2 / 2, so that everything has a closed form.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from parsifl.solvers.coupled import Coupled, smooth_sign

RHO, GAMMA, GAMMA_W = 0.1, 0.2, 0.05
DRAW = np.random.default_rng(0)
HESSIANS = [np.diag(DRAW.uniform(1.0, 2.0, 12)) for _ in range(8)]
OPTIMA = [DRAW.normal(size=12) for _ in range(8)]
LAM = 0.5  # half of the strong convexity


def tanh(value: np.ndarray) -> np.ndarray:
    return np.tanh(value / RHO)


def personal(client: int, w: np.ndarray) -> np.ndarray:
    """Return theta_i(w) = argmin l_i + gamma phi(theta) - lambda <theta, w> by Newton."""
    h, best = np.diag(HESSIANS[client]), OPTIMA[client]
    low, high = best - 5.0, best + 5.0
    for _ in range(200):  # separable and monotone: bisection cannot fail
        middle = (low + high) / 2
        rises = h * (middle - best) + GAMMA * tanh(middle) - LAM * w > 0
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    found: np.ndarray = (low + high) / 2
    return found


def slope(client: int, w: np.ndarray) -> np.ndarray:
    """Return the gradient (6): lambda (w - theta_i(w)) + gamma_w tanh(w / rho)."""
    found: np.ndarray = LAM * (w - personal(client, w)) + GAMMA_W * tanh(w)
    return found


def test_proposition_1_curvature_lies_between_the_printed_constants() -> None:
    """The true largest curvature is lambda + gamma_w / rho: L_F is loose by lambda^2 / mu."""
    step, found = 1e-5, []
    for _ in range(20):
        w = DRAW.normal(size=12)
        rise = (slope(0, w + step) - slope(0, w - step)) / (2 * step)  # separable: a diagonal
        found += rise.tolist()
    least = LAM - LAM**2 / 1.0
    true = LAM + GAMMA_W / RHO
    assert least - 1e-6 <= min(found)
    assert max(found) <= true + 1e-6 < true + LAM**2 / 1.0


def test_lemma_10_is_false_as_printed() -> None:
    """Two clients in one dimension: l_i = (theta -+ 1)^2, lambda = 1, no penalties.

    At w* = 0 the personal models are +1 and -1 over (2 - 0): the left side is positive, the
    printed bound, which has the gradient of H_i for that of F_i, is 0. With the gradient of (6)
    the bound is (2 / lambda^2) (sigma_F^2 + gamma_w^2 d_s).
    """
    lam = 1.0
    theta = np.array([1.0, -1.0])  # 2 (theta -+ 1) = lambda w at w = 0
    w = 0.0
    left = float(np.mean((theta - w) ** 2))
    inner = 2 * (theta - np.array([1.0, -1.0])) - lam * w  # gradient of H_i at its minimum
    outer = lam * (w - theta)  # gradient of F_i
    assert abs(outer.mean()) < 1e-15  # w = 0 is the minimum of F
    printed = 2 / lam**2 * float(np.mean(inner**2))
    mended = 2 / lam**2 * float(np.mean(outer**2))
    assert printed < left <= mended


def test_the_second_part_of_theorem_3_contradicts_the_same_example() -> None:
    """v = sum (sign theta - zeta w)^2 is 1 for every zeta, while its bound falls to 0 with zeta."""
    w, theta = 0.0, 1.0
    for zeta in (1.0, 0.1, 1e-3):
        assert (np.sign(theta) - zeta * w) ** 2 == 1.0
    assert 2 * 1e-3**2 < 1.0


def test_lemma_1_is_false_if_the_noise_depends_on_theta() -> None:
    """Step (a) takes the minimizer of a mini-batch as independent of its noise.

    d = 1, l = theta^2 / 2, one of eight samples; sample j has the gradient theta + e_j(theta) with
    mean 0 and variance 1 at every theta. The minimizers are chosen where |e_j| is large.
    """
    count = 8
    peak = np.sqrt(count - 1.0)  # one sample at +peak, the others at -peak / (count - 1)
    errors = []
    for sample in range(count):
        # noise of sample j: +peak near theta_j = -peak, and small elsewhere; mean over samples 0
        theta = -peak
        noise = np.full(count, -peak / (count - 1))
        noise[sample] = peak
        assert noise.mean() == pytest.approx(0.0)
        assert (noise**2).mean() == pytest.approx(1.0)
        assert theta + noise[sample] == pytest.approx(0.0)  # theta minimizes the batch loss
        errors.append((theta - 0.0) ** 2)
    assert np.mean(errors) > 2.0  # printed: at most 2 gamma_l^2 / mu^2 = 2


def test_a_step_is_stable_up_to_the_bound_and_not_beyond() -> None:
    """An anchor near theta = 0 settles if eta (lambda + gamma_w / rho) < 2; else it oscillates."""

    def settled(rate: float) -> float:
        rule = Coupled(rate=rate, lam=1e-4, gamma=0.0, gamma_w=1e-5, rho=1e-2)
        w = 0.003
        for _ in range(400):
            w -= rule.rate * (rule.lam * w + rule.gamma_w * float(smooth_sign(
                torch.tensor(w, dtype=torch.float64), rule.rho)))  # fmt: skip
        return abs(w)

    assert settled(1.9 / (1e-4 + 1e-5 / 1e-2)) < 1e-9
    assert settled(2.2 / (1e-4 + 1e-5 / 1e-2)) > 1e-3


def test_the_penalized_problem_of_theorem_2_may_have_no_solution() -> None:
    """X = (1, 0), w = (0, 2), zeta = 1: f(0, t) = |t| - 2 t falls without end."""
    values = [abs(t) - 2 * t for t in (1.0, 10.0, 100.0)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_the_gradient_of_the_smoothed_norm_is_bounded_by_the_dimension() -> None:
    """(21) prints d_s^2; d_s suffices."""
    found = tanh(DRAW.normal(size=(50, 12)))
    assert float((found**2).sum(1).max()) <= 12 < 144
