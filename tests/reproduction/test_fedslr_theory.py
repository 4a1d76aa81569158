"""FedSLR's statements as numerical tests, with the smallest counter-examples.

Local problems are solved exactly. `tests/algorithms/test_fedslr.py` has the duals (25) and the
potential of Definition 1 with the library's own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

Array = np.ndarray
CLIENTS, WIDTH = 5, 4
DRAW = np.random.default_rng(0)
HESSIANS = [np.diag(DRAW.uniform(0.3, 1.0, WIDTH)) for _ in range(CLIENTS)]
OPTIMA = [3 * DRAW.normal(size=WIDTH) for _ in range(CLIENTS)]
L = max(float(h.max()) for h in HESSIANS)
LAM = 0.2


def slope(client: int, w: Array) -> Array:
    found: Array = HESSIANS[client] @ (w - OPTIMA[client])
    return found


def shrink(value: Array, tau: float) -> Array:
    found: Array = np.sign(value) * np.maximum(np.abs(value) - tau, 0)
    return found


def walk(eta: float, rounds: int) -> Iterator[tuple[Array, list[Array]]]:
    """Yield w_t and the w_{i,t} that made it: (4) to (6), with the l1 norm for R."""
    w, gamma = np.zeros(WIDTH), [np.zeros(WIDTH) for _ in range(CLIENTS)]
    for _ in range(rounds):
        local = []
        for i in range(CLIENTS):
            system = HESSIANS[i] + np.eye(WIDTH) / eta
            right = HESSIANS[i] @ OPTIMA[i] + gamma[i] + w / eta
            local.append(np.linalg.solve(system, right))
            gamma[i] = gamma[i] + (w - local[i]) / eta
            np.testing.assert_allclose(gamma[i], slope(i, local[i]), atol=1e-9)  # (25)
        w = shrink(np.mean(local, 0) - eta * np.mean(gamma, 0), LAM * eta)
        yield w, local


def mapping(w: Array) -> float:
    """Return the distance of 0 to grad f + d R at w."""
    return distance(np.mean([slope(i, w) for i in range(CLIENTS)], axis=0), w)


def distance(point: Array, w: Array) -> float:
    """Return the distance of 0 to point + d R(w)."""
    free = np.maximum(np.abs(point) - LAM, 0.0)
    return float(np.linalg.norm(np.where(w != 0, point + LAM * np.sign(w), free)))


@pytest.mark.parametrize("factor", [0.5, 0.9, 3.0, 20.0])
def test_theorem_1_holds_also_for_steps_beyond_its_bound(factor: float) -> None:
    """For convex quadratics, eta_g < 1 / (2 L) is sufficient, not needed."""
    *_, (w, _) = walk(factor / (2 * L), 600)
    assert mapping(w) < 1e-8


@pytest.mark.parametrize(("factor", "apart"), [(0.9, 0.0), (1.0, 0.2)])
def test_theorem_1_needs_a_strict_bound_on_the_step(factor: float, apart: float) -> None:
    """At eta_g = 1 / (2 L) the factor of Lemma 3 is zero, and (8) can be false.

    One client, one weight, L = 1, R = |w| / 2. The global model stays at 0. With the strict bound
    the distance of the local model to 0 shrinks by factor / (2 - factor) per round. At the bound
    it keeps its size and changes its sign.
    """
    eta = factor / 2
    w, gamma, models = 0.0, 0.0, []
    for _ in range(200):
        models.append(_root(_hill, gamma, w, eta))
        gamma += (w - models[-1]) / eta
        w = float(shrink(np.array(models[-1] - eta * gamma), eta / 2))
        assert w == 0
        assert gamma == pytest.approx(_hill(models[-1]), abs=1e-12)
    assert abs(models[-1] - models[-2]) == pytest.approx(apart, abs=1e-12)


def _hill(w: float) -> float:
    """Return the slope of f(w) = -(w - 0.1)^2 / 2 near 0, which is -1 and flat far away."""
    x = w - 0.1
    return -x if abs(x) <= 1 else float(np.sign(x)) * min(abs(x) - 2, 0.0)


def test_equations_46_to_48_need_half_of_l() -> None:
    """At 1 / (2 L) the printed factor is L / 2; it is "<= 0" only up to 0.366 / L."""
    eta = 1 / (2 * L)
    assert L**2 * eta + L - 1 / (2 * eta) == pytest.approx(L / 2)
    assert L**2 * eta + L / 2 - 1 / (2 * eta) == pytest.approx(0, abs=1e-12)


def test_equations_28_and_56_need_the_new_local_models_and_half_of_the_inverse_step() -> None:
    eta = 0.5 / (2 * L)
    for _, local, following, after in rounds(eta, 6):
        duals = np.mean([slope(i, mine) for i, mine in enumerate(after)], axis=0)
        right, printed = (
            distance(duals + (following - np.mean(models, 0)) / eta, following)
            for models in (after, local)
        )
        assert right < 1e-12
        assert printed > 0.01
        best, other = (  # the minimizer with the factor 1 / (2 step) of (26)
            shrink(np.mean(after, 0) - step * duals, LAM * step) for step in (eta, eta / 4)
        )
        np.testing.assert_allclose(best, following, atol=1e-12)
        assert np.linalg.norm(other - following) > 0.01


def test_equations_37_to_40_and_the_line_above_50_need_the_inverse_of_the_step() -> None:
    eta = 0.5 / (2 * L)
    for w, local, following, after in rounds(eta, 6):
        duals = np.mean([slope(i, mine) for i, mine in enumerate(after)], axis=0)
        gap = following - np.mean(after, axis=0)
        assert distance(duals + gap / eta, following) < 1e-12  # (37), by (27)
        assert distance(duals + eta * gap, following) > 0.01
        for i, (before, now) in enumerate(zip(local, after, strict=True)):
            change = slope(i, now) - slope(i, before)  # of gamma_i
            np.testing.assert_allclose(change, (w - now) / eta, atol=1e-12)
            assert np.linalg.norm(change - eta * (w - now)) > 0.5 * np.linalg.norm(change)


def test_equation_33_needs_half_of_the_step() -> None:
    eta = 0.3
    gamma, gap = np.random.default_rng(2).normal(size=(2, WIDTH))
    left = gamma @ gap + gap @ gap / (2 * eta)
    square = np.sum((gap + eta * gamma) ** 2) / (2 * eta)
    assert left == pytest.approx(square - eta / 2 * gamma @ gamma)
    assert left - (square - eta * gamma @ gamma) == pytest.approx(eta / 2 * gamma @ gamma)


def test_theorem_2_the_linear_case() -> None:
    errors = [mapping(w) for w, _ in walk(1 / (2 * L), 300)]
    assert errors[100] < 1e-2 * errors[10]
    assert errors[200] < 1e-2 * errors[100]


def test_constant_c1_of_equation_70_needs_the_square_of_the_step() -> None:
    """The triangle inequality gives (1 / eta_g)^2, not 1 / eta_g."""
    eta = 0.1 / (2 * L)
    printed = 4 * (eta * L**2 + eta**2 * L**4 + 1 / eta + L**2)
    mended = 4 * (1 / eta**2 + L**2) * (1 + eta**2 * L**2)
    states = list(walk(eta, 200))
    broken = 0
    for (w, local), (_, following) in pairwise(states):
        pull = np.mean([slope(i, w) - slope(i, local[i]) for i in range(CLIENTS)], axis=0)
        left = float(np.sum((pull - (w - np.mean(local, 0)) / eta) ** 2))
        moved = np.mean([np.sum((b - a) ** 2) for a, b in zip(local, following, strict=True)])
        broken += left > printed * moved
        assert left <= mended * moved + 1e-12
    assert broken > 150


def test_constant_c2_is_never_positive_under_the_assumption() -> None:
    """(71) calls L^2 eta_g + L / 2 - 1 / (2 eta_g) positive; (72) divides by it."""
    for factor in (0.1, 0.5, 1.0):
        eta = factor / (2 * L)
        assert L**2 * eta + L / 2 - 1 / (2 * eta) <= 1e-12


@pytest.mark.parametrize("power", [6, 8, 12])
def test_the_sublinear_rate_of_theorem_2_is_false_and_that_of_its_proof_holds(power: int) -> None:
    """One client, f = w^p / p on [-1, 1], R = 0, theta = 1 - 1/p.

    Printed: T^-(4 theta - 2). The proof gives T^(-1 / (4 theta - 2)).
    """
    theta = 1 - 1 / power
    eta = 1 / (2 * (power - 1))
    w, gamma, found = 1.0, 1.0, []
    for _ in range(4_000):
        local = _root(lambda v: v ** (power - 1), gamma, w, eta)
        gamma += (w - local) / eta
        w = local - eta * gamma
        found.append(abs(w) ** (power - 1))
    first, last = 400, len(found)
    rate = -np.log(found[-1] / found[first - 1]) / np.log(last / first)
    assert 1 / (4 * theta - 2) < rate < 4 * theta - 2


def _root(gradient: Callable[[float], float], gamma: float, w: float, eta: float) -> float:
    """Return the minimizer of the local problem (4)."""
    low, high = -2.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if gradient(middle) - gamma + (middle - w) / eta < 0 else (low, middle)
        )
    return (low + high) / 2


def rounds(eta: float, count: int) -> list[tuple[Array, list[Array], Array, list[Array]]]:
    """Return (w_t, w_{i,t}, w_{t+1}, w_{i,t+1}) of each round in which (25) holds for both."""
    return [(*a, *b) for a, b in pairwise(walk(eta, count))]


def potential(w: Array, local: list[Array], eta: float) -> float:
    """Return D of Definition 1, with gamma_i = grad f_i(w_i)."""
    total = LAM * float(np.abs(w).sum())
    for i, mine in enumerate(local):
        gap, fit = w - mine, mine - OPTIMA[i]
        terms = fit @ HESSIANS[i] @ fit / 2 + slope(i, mine) @ gap + gap @ gap / (2 * eta)
        total += float(terms) / CLIENTS
    return total


def moved(before: list[Array], after: list[Array]) -> float:
    """Return the mean over clients of |w_{i,t+1} - w_{i,t}|^2."""
    return float(np.mean([np.sum((b - a) ** 2) for a, b in zip(before, after, strict=True)]))


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
def test_lemmas_1_and_3_hold_as_printed(factor: float) -> None:
    eta = factor / (2 * L)
    for w, local, following, after in rounds(eta, 200):
        for a, b in zip(local, after, strict=True):
            left, right = np.linalg.norm(w - b), L * eta * np.linalg.norm(b - a)
            assert left <= right + 1e-12
        change = (L**2 * eta + L / 2 - 1 / (2 * eta)) * moved(local, after)
        change -= float(np.sum((following - w) ** 2)) / (2 * eta)
        fall = potential(following, after, eta) - potential(w, local, eta)
        assert fall <= change + 1e-12


def test_lemmas_2_and_4_the_potential_falls_to_its_limit() -> None:
    eta = 0.9 / (2 * L)
    values = [potential(w, local, eta) for w, local in walk(eta, 400)]
    residuals = np.array(values) - values[-1]
    assert np.isfinite(values).all()
    assert (residuals >= -1e-12).all()
    assert residuals[200] < 1e-9 * residuals[0]


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.9])
def test_equation_72_holds_with_the_other_sign_of_c2_and_the_mended_c1(factor: float) -> None:
    eta = factor / (2 * L)
    first = 4 * (1 / eta**2 + L**2) * (1 + eta**2 * L**2)
    second = 1 / (2 * eta) - L / 2 - L**2 * eta
    assert second > 0
    states = list(walk(eta, 600))
    least = potential(*states[-1], eta)
    residuals = [potential(w, local, eta) - least for w, local in states]
    above = [(w, r) for (w, _), r in zip(states, residuals, strict=True) if r > 1e-10]  # rounding
    assert len(above) > 20
    for w, residual in above:
        assert mapping(w) <= np.sqrt(first / second * residual)


def test_theorem_2_no_potential_has_an_exponent_below_one_half() -> None:
    """The cases theta = 0 and 0 < theta < 1/2 are empty.

    The smallest example: one client, f = 0, R = 0. At (w, w_1, gamma) = (0, d, 0) the potential is
    d^2 / (2 eta_g), and its gradient has a length of the order of d. The KL inequality
    1 <= c (1 - theta) D^-theta |grad D| then fails for small d, whatever c is.
    """
    eta = 0.5

    def side(theta: float, d: float) -> float:
        gradient = np.array([-d / eta, d / eta, -d])  # by w, w_1 and gamma
        return float((d**2 / (2 * eta)) ** -theta * np.linalg.norm(gradient))

    for theta in (0.0, 0.25, 0.49):
        assert side(theta, 1e-150) < 0.01 * side(theta, 1e-3)
    assert side(0.5, 1e-150) == pytest.approx(side(0.5, 1e-3))


def test_theorem_3_the_mappings_of_the_local_fusion_are_summable() -> None:
    """O(1/T) for full batches, by the bound (96) with its 1 / (TK).

    Lemma 5 is checked in every step.
    """
    client, mu, steps, rounds = 0, 0.1, 3, 300
    eta = 1 / (L + 1)  # below 2 / (L + 1)
    path = [w for w, _ in walk(1 / (2 * L), rounds)]
    limit = path[-1]

    def loss(p: Array) -> float:
        gap = limit + p - OPTIMA[client]
        return float(gap @ HESSIANS[client] @ gap / 2 + mu * np.abs(p).sum())

    p = np.zeros(WIDTH)
    squares, first = [], loss(p)
    for w in path:
        for _ in range(steps):
            g = slope(client, w + p)
            after = shrink(p - eta * g, eta * mu)
            gain = mu * float(np.abs(after).sum() - np.abs(p).sum())
            assert g @ (p - after) >= gain + np.sum((after - p) ** 2) / eta - 1e-12  # Lemma 5
            squares.append(float(np.sum(((p - after) / eta) ** 2)))
            p = after
    drift = steps * sum(L**2 * float(np.sum((w - limit) ** 2)) for w in path)
    bound = (2 * (first - loss(p)) + drift) / (2 * eta - (L + 1) * eta**2)
    sums = np.cumsum(squares)
    assert sums[-1] <= bound
    assert sums[-1] < 1.01 * sums[len(sums) // 3]


def test_equation_95_holds_as_printed_although_94_gives_twice_the_variance() -> None:
    """(94) gives 2 sigma^2. One Young inequality for T1 + T2 gives sigma^2.

    2 (T1 + T2) <= eta^2 E |G|^2 + E |noise - drift|^2, and the noise has mean zero. Here it has
    two values, so that expectations are exact.
    """
    draw, mu = np.random.default_rng(3), 0.2
    for _ in range(300):
        curvature = draw.uniform(-1, 1, WIDTH)  # L = 1
        w, limit, p, noise = draw.normal(size=(4, WIDTH))
        eta = draw.uniform(0.05, 1)  # below 2 / (L + 1)
        g = curvature * (w + p)
        steps = [shrink(p - eta * (g + n), eta * mu) for n in (noise, -noise)]
        losses = [
            float(np.sum(curvature * (limit + q) ** 2) / 2 + mu * np.abs(q).sum())
            for q in (p, *steps)
        ]
        left = np.mean([np.sum(((p - q) / eta) ** 2) for q in steps])
        right = 2 * (losses[0] - np.mean(losses[1:])) + np.sum((limit - w) ** 2) + noise @ noise
        assert (2 * eta - 2 * eta**2) * left <= right + 1e-12


def test_equation_100_and_c7_need_the_square_of_l() -> None:
    """One client, f = L w^2 / 2, R = 0, T = 100; from round N on, |w_t| <= 1 / sqrt(T)."""
    smooth, count, start = 100.0, 100, 10.0
    eta = 1 / (2 * smooth)
    w, gamma, path = start, smooth * start, []
    for _ in range(count):
        path.append(w)
        local = (gamma + w / eta) / (smooth + 1 / eta)
        gamma += (w - local) / eta
        w = local - eta * gamma
    last = 1 + max(t for t, value in enumerate(path) if abs(value) > count**-0.5)  # N
    left = smooth**2 * sum(value**2 for value in path)  # times T
    pairs, fall = last * (last + 1) / 2, smooth * start**2 / 2
    printed = (pairs + 1) * start**2 + pairs * eta * fall + smooth**2
    # (99) with its t + 1 terms and the 2 eta_g of Lemma 3
    mended = (last + 1) * (last + 2) / 2 * (start**2 + 2 * eta * fall) + 1
    assert left / printed == pytest.approx(79, abs=0.5)
    assert left <= smooth**2 * mended


def test_lemma_7_a_noisy_mapping_is_as_near_as_its_gradient() -> None:
    draw, eta, mu = np.random.default_rng(1), 0.3, 0.2
    for _ in range(100):
        p, g, noise = draw.normal(size=(3, WIDTH))
        noisy, exact = ((p - shrink(p - eta * v, eta * mu)) / eta for v in (g + noise, g))
        assert np.linalg.norm(noisy - exact) <= np.linalg.norm(noise) + 1e-12


def test_the_limit_of_gpgd_is_not_stationary() -> None:
    """A.2: with several local steps, the mean of the local models drifts; FedSLR's does not."""
    rate = 0.2 / L
    w = np.zeros(WIDTH)
    for _ in range(2_000):
        models = []
        for i in range(CLIENTS):
            mine = w
            for _ in range(10):
                mine = mine - rate * slope(i, mine)
            models.append(mine)
        w = shrink(np.mean(models, 0), rate * LAM)
    *_, (ours, _) = walk(1 / (2 * L), 600)
    assert mapping(w) > 0.05
    assert mapping(ours) < 1e-8


def test_duals_become_the_gradients_and_updates_of_many_steps_do_not() -> None:
    """A.6.1: what a server could read off gamma_i, with ten local steps that solve (4) roughly."""
    eta, steps, rate = 1 / (2 * L), 10, 0.2 / L
    w, gamma = np.zeros(WIDTH), [np.zeros(WIDTH) for _ in range(CLIENTS)]
    for _ in range(600):
        local = []
        for i in range(CLIENTS):
            mine = w
            for _ in range(steps):
                mine = mine - rate * (slope(i, mine) - gamma[i] + (mine - w) / eta)
            local.append(mine)
            gamma[i] = gamma[i] + (w - mine) / eta
        w = shrink(np.mean(local, 0) - eta * np.mean(gamma, 0), LAM * eta)
    for i in range(CLIENTS):
        exact, mine = slope(i, w), w
        np.testing.assert_allclose(gamma[i], exact, atol=1e-6)
        for _ in range(steps):
            mine = mine - rate * slope(i, mine)
        update = (w - mine) / (rate * steps)  # what FedAvg would send, as a gradient
        assert np.linalg.norm(update - exact) > 0.2 * np.linalg.norm(exact)
