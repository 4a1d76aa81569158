"""FedMac's statements as numerical tests; where the print is wrong, the smallest counter-example.

Quadratic clients l_i(theta) = |A_i theta - b_i|^2 / 2, so that everything has a closed form.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from parsifl.engine.experiment import Experiment
from parsifl.solvers.coupled import Coupled, smooth_sign
from parsifl_reproduction.fedmac.recovery import Prior, predicted_rows

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
    for _ in range(60):  # separable and monotone: bisection cannot fail
        middle = (low + high) / 2
        rises = h * (middle - best) + GAMMA * tanh(middle) - LAM * w > 0
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    found: np.ndarray = (low + high) / 2
    return found


def slope(client: int, w: np.ndarray) -> np.ndarray:
    """Return the gradient (6): lambda (w - theta_i(w)) + gamma_w tanh(w / rho)."""
    found: np.ndarray = LAM * (w - personal(client, w)) + GAMMA_W * tanh(w)
    return found


def value(client: int, w: np.ndarray) -> float:
    """Return F_i(w)."""
    theta, h = personal(client, w), np.diag(HESSIANS[client])
    smooth = GAMMA * norm(theta) + GAMMA_W * norm(w)
    loss = 0.5 * h @ (theta - OPTIMA[client]) ** 2
    return float(loss + smooth - LAM * theta @ w + 0.5 * LAM * w @ w)


def norm(x: np.ndarray) -> float:
    """Return the smoothed l1 norm."""
    return float(RHO * np.log(np.cosh(x / RHO)).sum())


def gap(w: np.ndarray) -> float:
    """Return F(w) - F(w*)."""
    return float(np.mean([value(i, w) - value(i, BEST) for i in range(8)]))


def minimizer() -> np.ndarray:
    """Return w*, by gradient descent with step 1 / L."""
    w = np.zeros(12)
    for _ in range(300):
        w = w - np.mean([slope(i, w) for i in range(8)], axis=0) / (LAM + GAMMA_W / RHO)
    return w


BEST = minimizer()
MU_F = LAM * (1 - LAM)  # mu >= 1
L_F = LAM + LAM**2 + GAMMA_W / RHO
SIGMA = float(np.mean([np.sum(slope(i, BEST) ** 2) for i in range(8)]))


def drifted(client: int, w: np.ndarray, rate: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the local model after exact steps, and the slopes on the way."""
    found = []
    for _ in range(steps):
        found.append(slope(client, w))
        w = w - rate * found[-1]
    return w, np.array(found)


def test_the_minimizer_of_the_quadratics_is_one() -> None:
    total = np.mean([slope(i, BEST) for i in range(8)], axis=0)
    assert float(np.abs(total).max()) < 1e-9
    assert gap(BEST + 0.01) > 0


@pytest.mark.parametrize("steps", [1, 10])
def test_lemma_2_bounds_the_drift_of_clients(steps: int) -> None:
    rate = 1 / (2 * L_F * np.sqrt(steps * (1 + steps)))
    w = BEST + DRAW.normal(size=12)
    drift = [
        float(((drifted(i, w, rate, steps)[1] - slope(i, w)) ** 2).sum(1).mean()) for i in range(8)
    ]
    assert np.mean(drift) <= 64 * rate * steps * L_F**2 * gap(w) + 8 * SIGMA


def test_lemma_3_is_an_equality() -> None:
    slopes = np.array([slope(i, np.zeros(12)) for i in range(8)])
    middle = slopes.mean(0)
    for cohort in (1, 3, 8):
        means = [slopes[list(part)].mean(0) for part in itertools.combinations(range(8), cohort)]
        left = np.mean([np.sum((mean - middle) ** 2) for mean in means])
        right = (8 / cohort - 1) / (8 * 7) * ((slopes - middle) ** 2).sum()
        assert left == pytest.approx(right, abs=1e-12)


def test_lemma_4_bounds_the_diversity_of_clients() -> None:
    for size in (0.1, 1.0, 5.0):
        w = BEST + size * DRAW.normal(size=12)
        slopes = np.array([slope(i, w) for i in range(8)])
        left = ((slopes - slopes.mean(0)) ** 2).sum(1).mean()
        assert left <= 4 * L_F * gap(w) + 2 * SIGMA


def test_lemma_5_bounds_one_round() -> None:
    """Cohorts of two of eight clients, the expectation by enumeration."""
    steps, w = 5, BEST + DRAW.normal(size=12)
    rate = 1 / (18 + 256 * L_F / MU_F) / L_F / steps
    moved = np.array([drifted(i, w, rate, steps)[0] for i in range(8)])
    slopes = np.array([slope(i, w) for i in range(8)])
    drift = np.mean(
        [((drifted(i, w, rate, steps)[1] - slopes[i]) ** 2).sum(1).mean() for i in range(8)]
    )
    pairs = [list(pair) for pair in itertools.combinations(range(8), 2)]
    left = np.mean([np.sum((moved[pair].mean(0) - BEST) ** 2) for pair in pairs])
    spread = np.mean([np.sum((slopes[pair].mean(0) - slopes.mean(0)) ** 2) for pair in pairs])
    eta = rate * steps
    right = np.sum((w - BEST) ** 2) - eta * (2 - 6 * L_F * eta) * gap(w)
    right += eta * (3 * eta + 1 / MU_F) * drift + 3 * eta**2 * spread
    assert left <= right


def test_theorem_1_holds_but_its_bound_exceeds_the_first_error() -> None:
    """(a) by (17), all clients: 32 sigma_F^2 / mu_F does not fall with T or with the step.

    Lemma 2 drops the factor eta-tilde in front of sigma_F^2, with which it would. (b) by (19) to
    (22) with d_s for d_s^2.
    """
    steps, rounds = 5, 40
    eta = 1 / (18 + 256 * L_F / MU_F) / L_F
    w, gaps = np.zeros(12), []
    for _ in range(rounds):
        gaps.append(gap(w))
        w = np.mean([drifted(i, w, eta / steps, steps)[0] for i in range(8)], axis=0)
    first = 32 * SIGMA / MU_F
    bound = float(np.sum(BEST**2)) / (eta * rounds) + first
    assert np.mean(gaps) <= bound
    assert first > gaps[0]
    left = np.mean([np.sum((personal(i, w) - BEST) ** 2) for i in range(8)])
    away = 2 / MU_F * bound
    right = 4 / LAM**2 * (2 * L_F**2 * away + 2 * SIGMA + GAMMA_W**2 * 12) + 4 * away
    assert left <= right


def rounds_of(cohorts: list[list[int]], steps: int, rate: float) -> np.ndarray:
    """Return the global model after one round per cohort, from w*."""
    w = BEST
    for cohort in cohorts:
        w = np.mean([drifted(i, w, rate, steps)[0] for i in cohort], axis=0)
    return w


def test_remark_3_sampling_and_drift_each_keep_the_model_away() -> None:
    """With every client and one exact step per round, w* is a fixed point.

    The second term of the theorem, "caused by client drift", does not vanish for one step.
    """
    everyone, draw = [list(range(8))] * 40, np.random.default_rng(1)
    some = [draw.permutation(8)[:2].tolist() for _ in everyone]
    away = {
        (cohorts is some, steps): float(np.sum((rounds_of(cohorts, steps, 0.1) - BEST) ** 2))
        for cohorts in (everyone, some)
        for steps in (1, 10)
    }
    assert away[False, 1] < 1e-12
    assert away[False, 10] > 1e-6  # drift
    assert away[True, 1] > 1e-3  # sampling
    assert SIGMA / MU_F > 1.0


def test_remark_3_inexact_personal_models_leave_a_neighbourhood() -> None:
    """Personal models that are off by delta: the gap is at most lambda^2 delta^2 / (2 mu_F)."""
    off = np.random.default_rng(2).normal(size=12)
    for delta in (0.1, 0.3):
        shift, w = LAM * delta * off / np.linalg.norm(off), np.zeros(12)
        for _ in range(300):
            mean = np.mean([slope(i, w) for i in range(8)], axis=0)
            w = w - (mean - shift) / (LAM + GAMMA_W / RHO)
        assert 0 < gap(w) <= LAM**2 * delta**2 / (2 * MU_F)


@pytest.mark.parametrize("count", [0, 3, 12])
def test_remark_3_a_less_sparse_model_needs_a_larger_lambda(count: int) -> None:
    """Equal Hessians: mean |theta_i - w*|^2 = variance of clients + gamma_w^2 d_s / lambda^2.

    So lambda strengthens the connection only as far as gamma_w weakened it, and d_s suffices for
    the printed d_s^2.
    """
    draw, gamma_w = np.random.default_rng(3), 0.01
    centre = np.where(np.arange(12) < count, 3.0, 0.0)
    noise = draw.normal(size=(8, 12))
    optima = centre + noise - noise.mean(0)
    for lam in (0.1, 0.5):
        w = np.maximum(centre - gamma_w / lam, 0.0) / (1 - lam)
        theta = optima + lam * w
        rest = lam * (w - theta.mean(0)) + gamma_w * np.sign(w)
        assert float(np.abs(rest).max()) < 1e-12  # w is the minimizer
        found = float(((theta - w) ** 2).sum(1).mean())
        variance = float(((optima - centre) ** 2).sum(1).mean())
        assert found == pytest.approx(variance + gamma_w**2 * count / lam**2)


def test_without_the_penalty_on_w_the_global_model_grows_without_bound() -> None:
    """Section 3.1: the correlation alone has the slope -lambda theta(w), which never vanishes."""
    free, kept = np.ones(1), np.ones(1)
    for _ in range(200):
        free = free + 0.5 * LAM * (
            1.0 + LAM * free
        )  # theta(w) = 1 + lambda w for l = (theta-1)^2/2
        kept = kept - 0.5 * LAM * (kept - (1.0 + LAM * kept))
    assert float(free[0]) > 1e6
    assert float(kept[0]) == pytest.approx(1 / (1 - LAM))


def test_step_22_of_theorem_1_is_false() -> None:
    """It bounds the last distance by the mean of the gaps before it.

    From w^0 = w*, after one round with one of the clients: the mean is 0 and the distance is not.
    """
    assert gap(BEST) == 0.0
    moved, _ = drifted(0, BEST, 0.1, 1)
    assert float(np.sum((moved - BEST) ** 2)) > 1e-3


def test_the_constant_of_the_rate_grows_with_sparseness() -> None:
    """One coordinate beside zero, steps of 1 / L with L = lambda + gamma_w / rho."""

    def steps_to(rho: float, far: float = 1.0) -> int:
        w, count = far, 0
        rate = 1 / (LAM + GAMMA_W / rho)
        while w > 1e-3:
            w, count = w - rate * (LAM * w + GAMMA_W * np.tanh(w / rho)), count + 1
        return count

    assert steps_to(1e-1) < steps_to(1e-2) < steps_to(1e-3)
    assert steps_to(1e-3) > 20 * steps_to(1e-1)


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

    At w* = 0 the personal models are +1 and -1. The left side is 1. The printed bound is 0, because
    its proof takes the gradient of H_i for that of F_i. With the gradient (6) the bound is
    (2 / lambda^2) (sigma_F^2 + gamma_w^2 d_s).
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


def test_lemma_10_in_its_right_form_holds_on_the_quadratics() -> None:
    slopes = np.array([slope(i, BEST) for i in range(8)])
    left = np.mean([np.sum((personal(i, BEST) - BEST) ** 2) for i in range(8)])
    printed = 2 * GAMMA_W**2 * 12**2 / LAM**2
    mended = 2 / LAM**2 * ((slopes**2).sum(1).mean() + GAMMA_W**2 * 12)
    assert printed < left <= mended


def test_the_second_part_of_theorem_3_contradicts_the_same_example() -> None:
    """v = sum (sign theta - zeta w)^2 is 1 for every zeta, while its bound falls to 0 with zeta."""
    w, theta = 0.0, 1.0
    for zeta in (1.0, 0.1, 1e-3):
        assert (np.sign(theta) - zeta * w) ** 2 == 1.0
    assert 2 * 1e-3**2 < 1.0


def test_lemma_1_is_false_if_the_noise_depends_on_theta() -> None:
    """Step (a) takes the minimizer of a mini-batch as independent of its noise.

    d = 1, l = theta^2 / 2, batches of one of eight samples. The gradient of sample j is
    theta + e_j(theta), where e_j has mean 0 and variance at most 1 over samples at every theta.
    Each sample has its own place where it alone is far off, and a stationary point there.
    """
    count = 8
    peak = np.sqrt(count - 1.0)  # the largest deviation of one of eight at variance 1
    levels = 1 - 0.05 * (np.arange(count) // 2)
    places = np.where(np.arange(count) % 2, 1.0, -1.0) * peak * levels

    def noise(theta: float) -> np.ndarray:
        """Return e_j(theta) of every sample: continuous bumps that do not overlap."""
        size = np.maximum(0.0, 1 - np.abs(theta - places) / 0.06)
        single = count * np.eye(count) - 1  # column j: sample j is off, and the others balance it
        found: np.ndarray = single @ (-places * size) / (count - 1)
        return found

    for theta in np.linspace(-3, 3, 601):
        assert noise(theta).mean() == pytest.approx(0.0, abs=1e-12)
        assert (noise(theta) ** 2).mean() <= 1 + 1e-12
    for sample, theta in enumerate(places):
        assert theta + noise(theta)[sample] == pytest.approx(0.0)  # nu = 0
    assert float(np.mean(places**2)) > 2.0  # printed: at most 2 gamma_l^2 / mu^2 = 2


def test_lemma_1_holds_if_the_noise_does_not_depend_on_theta() -> None:
    """theta-tilde = -e / mu, so the error is gamma_l^2 / (mu^2 |D|): half of the bound."""
    noise = DRAW.normal(size=(20_000, 5))  # |D| = 5, gamma_l = mu = 1
    assert float((noise.mean(1) ** 2).mean()) <= 2 / 5


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


def test_theorem_2_bounds_the_error_of_the_penalized_problem() -> None:
    """(27): at most gamma alpha_f / epsilon^2, with epsilon the least |X h| of a unit vector h.

    With more rows than columns, epsilon is at least the least singular value.
    """
    x = DRAW.normal(size=(60, 20))
    truth = np.zeros(20)
    truth[:3] = (1.0, -1.0, 1.0)
    w, zeta = truth + 0.1 * DRAW.normal(size=20), 0.5
    alpha = np.sqrt(20.0) + zeta * np.linalg.norm(w)  # |f(a) - f(b)| <= alpha |a - b|
    theta, rate = np.zeros(20), 0.5 / np.linalg.norm(x, 2) ** 2
    gamma = 1 / alpha
    for _ in range(5000):
        theta = theta - rate * (2 * x.T @ (x @ (theta - truth)) - gamma * zeta * w)
        theta = np.sign(theta) * np.maximum(np.abs(theta) - rate * gamma, 0.0)
    least = np.linalg.svd(x, compute_uv=False)[-1]
    assert np.linalg.norm(theta - truth) <= gamma * alpha / least**2


def similar(off: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a sparse vector of signs and a prior that is wrong on and, perhaps, off it."""
    theta, prior = np.zeros(400), np.zeros(400)
    theta[:8] = np.where(np.arange(8) % 2, 1.0, -1.0)
    prior[:8] = theta[:8] + 0.1 * DRAW.normal(size=8)
    prior[8:12] = off
    return theta, prior


def shifted(kind: Prior, theta: np.ndarray, prior: np.ndarray, zeta: float) -> np.ndarray:
    found: np.ndarray = zeta * (theta - prior) if kind == "l2" else -zeta * prior
    return found


def excess(kind: Prior, theta: np.ndarray, prior: np.ndarray, zeta: float) -> float:
    """Return v_zeta."""
    on = theta != 0
    shift = shifted(kind, theta, prior, zeta)
    over = np.maximum(zeta * np.abs(prior[~on]) - 1, 0.0)
    return float(((np.sign(theta) + shift)[on] ** 2).sum() + (over**2).sum())


PRIORS: tuple[Prior, ...] = ("correlation", "l2")


@pytest.mark.parametrize("kind", PRIORS)
def test_lemma_7_bounds_the_gaussian_complexity(kind: Prior) -> None:
    """By polarity, sup <g, d> over the cone is the distance of g to the cone of df."""
    theta, prior = similar(0.3)
    shift, on = shifted(kind, theta, prior, 0.5), theta != 0
    g = DRAW.normal(size=(200, 400))

    def squared(tau: float, g: np.ndarray) -> np.ndarray:
        exact = (g[:, on] - tau * (np.sign(theta) + shift)[on]) ** 2
        outside = np.maximum(np.abs(g[:, ~on] - tau * shift[~on]) - tau, 0.0) ** 2
        found: np.ndarray = exact.sum(1) + outside.sum(1)
        return found

    taus = np.linspace(0.0, 12.0, 121)
    both = [np.sqrt(np.min([squared(tau, side) for tau in taus], axis=0)) for side in (g, -g)]
    complexity = float(np.maximum(*both).mean())
    distance = min(float(np.sqrt(squared(tau, g).mean())) for tau in taus)
    assert complexity <= 2 * distance + 1


@pytest.mark.parametrize("kind", PRIORS)
@pytest.mark.parametrize("off", [0.0, 0.3])
@pytest.mark.parametrize("zeta", [0.2, 1.0])
def test_lemmas_8_and_9_bound_the_gaussian_squared_distance(
    kind: Prior, off: float, zeta: float
) -> None:
    theta, prior = similar(off)
    size, nonzeros = theta.size, 8
    union = 12 if off else 8
    near = zeta * off
    condition = abs(1 - near) * np.exp((near**2 - 2 * near) * np.log(size / union))
    assert (union - nonzeros) / (size - union) <= condition  # (32) and (34)
    printed = 2 * excess(kind, theta, prior, zeta) * np.log(size / union) + nonzeros + 0.8 * union
    assert predicted_rows(theta, kind, prior, zeta) <= printed


def test_a_small_zeta_does_not_reduce_the_samples() -> None:
    """Section 5.3 chooses a small lambda because Theorem 3 would show that it does.

    The bound of its second part falls with zeta; the samples are those without a prior.
    """
    theta, prior = similar(0.0)
    rows = [predicted_rows(theta, "correlation", prior, zeta) for zeta in (1e-3, 0.3, 0.9)]
    assert rows[0] == pytest.approx(predicted_rows(theta, "none", prior, 0.0), rel=0.01)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 0.5 * rows[0]


def test_trained_weights_are_no_closer_to_their_signs_than_gaussian_ones() -> None:
    """Assumption 5 asks for zeta w = sign(w); Gaussian entries are at 37 degrees from it."""

    def angle(**settings: Any) -> float:
        run = Experiment(
            "fedmac", settings, data="digits", clients=10, rounds=30, evaluate_every=0
        ).run()
        w = torch.cat([leaf.flatten() for leaf in run.model.params.values()]).double()
        return float(np.degrees(np.arccos(float(w.abs().mean() / w.square().mean().sqrt()))))

    assert 35 < angle() < 42
    assert angle(gamma=1e-3) > 42
