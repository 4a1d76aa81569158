"""PerFedMask's statements as numerical tests, with the smallest counter-examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fednova import FedNova
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM
from parsifl.masks.instance import bias, gammas


def test_equation_23d_needs_gradients_that_agree() -> None:
    """ "Follows from gamma_n >= 1/N" is false where <grad f_n, grad F> is negative."""
    gamma = gammas(np.array([[1, 1], [1, 0]], dtype=bool))
    assert gamma.tolist() == [1.0, 0.5]
    gradients = np.array([[-1.0, 0.0], [3.0, 0.0]])
    whole = gradients.mean(0)
    left = sum(g * float(own @ whole) for g, own in zip(gamma, gradients, strict=True))
    right = sum(float(own @ whole) / 2 for own in gradients)
    assert whole.tolist() == [1.0, 0.0]
    assert (left, right) == (0.5, 1.0)
    assert left < right


def test_equations_24_to_28_use_jensen_in_the_wrong_direction() -> None:
    """f_n = (w -+ 1)^2 / 2 at w = 0, full masks: F stays 1/2, (28) promises at most 13/32."""
    devices, smooth, gamma, start = 2, 1.0, 0.5, 0.0
    step = 1 / (smooth * devices**2)  # the largest that the theorem allows, tau = 1
    moved = np.mean([start - step * (start - 1), start - step * (start + 1)])

    def loss(w: float) -> float:
        return float(np.mean([(w - 1) ** 2 / 2, (w + 1) ** 2 / 2]))

    slopes = [start - 1, start + 1]  # their mean, the gradient of F, is 0
    shares = 1 / devices - smooth * devices * gamma**2 * step
    promised = loss(start) - step / 2 * sum(shares * slope**2 for slope in slopes)
    assert promised == 13 / 32
    assert loss(float(moved)) == loss(start) == 0.5


def test_lemma_3_is_false_as_printed_and_true_with_a_shorter_step() -> None:
    """x(gamma) is concave: x(1) >= x(1/N) needs eta <= 1 / (L ((N + 1) tau + 1))."""
    devices, steps, smooth = 5, 2, 1.0

    def x(gamma: float, eta: float) -> float:
        return gamma * (1 - eta * smooth * (1 + gamma * devices * steps))

    printed = 1 / (smooth * (devices * steps + 1))
    mended = 1 / (smooth * ((devices + 1) * steps + 1))
    assert x(1.0, printed) == pytest.approx(0.0)
    assert x(1.0, printed) < x(1 / devices, printed)
    assert x(1.0, mended) == pytest.approx(x(1 / devices, mended))


def test_no_design_has_a_bias_below_d_minus_the_mean_trained_parameters() -> None:
    """Attained where all devices train everything."""
    draw = np.random.default_rng(0)
    for _ in range(2000):
        sizes = draw.integers(1, 20, size=5).astype(float)
        masks = draw.random((6, 5)) < draw.uniform(0.2, 0.9)
        masks[~masks.any(axis=1), 0] = True
        masks[0] = True
        trained = float((masks @ sizes).mean())
        assert bias(sizes, masks) >= sizes.sum() - trained - 1e-9
    assert bias(np.array([3.0, 5.0]), np.ones((3, 2), dtype=bool)) == 0.0


@pytest.mark.parametrize("strong", [0.2, 0.4, 0.5])
def test_theorem_1_is_empty_where_devices_train_half_on_average(strong: float) -> None:
    """By the definition of Psi, |grad F|^2 <= d Psi; the bound is at least 2 Psi bias.

    Devices that train an eighth, or everything: with nu <= 3/7 the mean is at most d / 2.
    """
    trained = strong + (1 - strong) / 8
    least = 1 - trained  # of bias / d, by the floor above
    assert (2 * least >= 1) == (strong <= 3 / 7)


def test_tables_4_and_5_cannot_both_hold() -> None:
    """CIFAR-100, nu = 0.2: Table 4 trains .941 of 3.207 million; Table 5 prints .204 and .609."""
    floor = 3.207 - 0.941
    assert floor > 2.26
    for printed in (0.204, 0.609):
        assert printed < floor


def test_the_variance_predicts_the_residual_of_quadratics_and_the_bias_does_not() -> None:
    """Equal curvature, optima drawn independently: E|grad F|^2 is proportional to V.

    Masked averaging ends where every parameter is the mean over the devices that train it.
    """
    draw = np.random.default_rng(1)
    devices, sizes = 10, np.array([4, 3, 2, 1])
    owner = np.repeat(np.arange(4), sizes)
    found: list[tuple[float, float, float]] = []
    for _ in range(60):
        masks = draw.random((devices, 4)) < 0.4
        masks[0] = True
        masks[~masks.any(axis=1), 0] = True
        cover = masks.sum(axis=0)
        variance = float(sizes @ (1 / cover - 1 / devices))
        optima = draw.normal(size=(400, devices, len(owner)))
        weight = masks[:, owner] / cover[owner]
        limit = (optima * weight).sum(1)
        residual = float(((limit - optima.mean(1)) ** 2).sum(1).mean())
        found.append((variance, bias(sizes.astype(float), masks), residual))
    v, b, true = (np.array(column) for column in zip(*found, strict=True))
    np.testing.assert_allclose(true, v, rtol=0.2)
    ranks = [column.argsort().argsort() for column in (v, b, true)]
    assert np.corrcoef(ranks[0], ranks[2])[0, 1] > 0.97
    assert np.corrcoef(ranks[1], ranks[2])[0, 1] < 0.9


def test_gamma_lies_between_1_over_n_and_1_and_is_one_over_the_least_coverage() -> None:
    """Section 4: the larger gamma_n, the fewer devices train a parameter of device n."""
    draw = np.random.default_rng(5)
    for _ in range(500):
        masks = draw.random((6, 5)) < draw.uniform(0.2, 0.9)
        masks[~masks.any(axis=1), 0] = True
        cover = masks.sum(axis=0)
        least = [int(cover[mask].min()) for mask in masks]
        assert gammas(masks) == pytest.approx([1 / number for number in least])
        assert all(1 <= number <= 6 for number in least)


def test_the_constraints_of_appendix_h_are_those_of_the_problem_for_binary_masks() -> None:
    """(31b) is (32), (33) is (34), and (35) holds for binary masks alone."""
    draw = np.random.default_rng(6)
    binary = (draw.random((200, 4)) < 0.5).astype(float)
    assert (binary == binary**2).all()  # so the numerators of (31b) and (32) agree
    k, cover = draw.random(200), draw.uniform(0, 4, 200)
    np.testing.assert_allclose(((k + cover) ** 2 - k**2 - cover**2) / 2, k * cover)
    relaxed = draw.uniform(0.01, 0.99, (200, 4))
    assert (binary.sum(1) - (binary**2).sum(1) <= 0).all()
    assert (relaxed.sum(1) - (relaxed**2).sum(1) > 0).all()


def test_unequal_steps_move_the_limit_of_fedavg_and_not_that_of_fednova() -> None:
    """Observation (4): two clients whose optima are 0 and 4; the objective has its optimum at 2."""
    clients = [(np.ones((4, 1)), np.full(4, optimum)) for optimum in (0.0, 4.0)]
    problem = GLM(1, "squared")

    def limit(algorithm: AnyAlgorithm, steps: Sequence[int]) -> float:
        profiles = [{"local_steps": count} for count in steps]
        run = simulate(algorithm, problem, clients, 400, profiles=profiles, test=0.0, seed=0)
        return float(next(iter(run.model.params.values())))

    settings: dict[str, Any] = {"lr": 0.02, "batch_size": 4, "weighting": "uniform"}
    assert limit(FedAvg(**settings), (4, 4)) == pytest.approx(2.0, abs=0.01)
    assert limit(FedAvg(**settings), (2, 4)) > 2.6
    assert limit(FedNova(**settings), (2, 4)) == pytest.approx(2.0, abs=0.05)


def test_masks_with_equal_steps_have_an_inconsistency_of_their_own() -> None:
    """A parameter that a device freezes has its optimum among the other devices alone."""
    optima = np.array([[0.0, 0.0], [4.0, 4.0]])
    masks = np.array([[True, False], [True, True]])
    fleet = Quadratics(np.ones((2, 2)), optima, masks)
    last = fleet.run(np.zeros(2), [0.02] * 400, steps=4).models[-1]
    np.testing.assert_allclose(fleet.best, [2.0, 2.0])
    np.testing.assert_allclose(last, [2.0, 4.0], atol=0.01)


def test_lemma_1_holds() -> None:
    draw = np.random.default_rng(2)
    x, y, z = draw.normal(size=(3, 20_000, 6))
    largest = y.max(1)
    least = np.abs((x * z).min(1))  # the smallest Q that the lemma allows
    left = (x * y * z).sum(1)
    right = largest * (x * z).sum(1) + least * (6 * largest - y.sum(1))
    assert (left <= right + 1e-9).all()


def test_theorem_1_is_not_violated_on_quadratics_although_its_proof_is_broken() -> None:
    """Exact gradients (xi = 0) and the constants of the trajectory itself."""
    draw = np.random.default_rng(3)
    devices, steps, rounds, size = 4, 2, 30, 5
    for _ in range(60):
        curvature = draw.uniform(0.1, 2.0, (devices, size))
        optima = draw.normal(size=(devices, size))
        masks = draw.random((devices, size)) < draw.uniform(0.3, 0.9)
        masks[0] = True
        masks[~masks.any(axis=1), 0] = True
        weight = masks / masks.sum(0)
        smooth = curvature.max()
        eta = 1 / (smooth * devices**2 * steps)
        w = draw.normal(scale=3.0, size=size)

        def loss(at: np.ndarray, curvature: np.ndarray, optima: np.ndarray) -> float:
            return float((curvature * (at - optima) ** 2).sum(1).mean() / 2)

        best = (curvature * optima).mean(0) / curvature.mean(0)
        first = loss(w, curvature, optima) - loss(best, curvature, optima)
        norms, psi, largest = [], 0.0, 0.0
        for _ in range(rounds):
            whole = (curvature * (w - optima)).mean(0)
            norms.append(float(whole @ whole))
            local = np.tile(w, (devices, 1))
            for _ in range(steps):
                own = curvature * (local - optima)
                psi = max(psi, float(np.abs((own * whole).max(1)).max()))
                largest = max(largest, float((own**2).sum(1).max()))
                local = local - eta * masks * own
            w = (weight * local).sum(0)
        drift = smooth**2 * eta**2 * largest * (steps - 1) * (2 * steps - 1) / 6
        unequal = bias(np.ones(size), masks)
        bound = 2 / (eta * steps * rounds) * first + 2 * psi * unequal + drift
        assert np.mean(norms) <= bound


@dataclass
class Quadratics:
    """Devices with f_n(w) = sum_l c_nl (w_l - o_nl)^2 / 2, and masked local gradient descent."""

    curvature: np.ndarray
    optima: np.ndarray
    masks: np.ndarray

    @classmethod
    def drawn(cls, draw: np.random.Generator, *, full: bool = False) -> Quadratics:
        devices, size = 4, 5
        masks = draw.random((devices, size)) < (1.0 if full else draw.uniform(0.3, 0.9))
        masks[0] = True
        masks[~masks.any(axis=1), 0] = True
        curvature = draw.uniform(0.5, 2.0, (devices, size))
        return cls(curvature, draw.normal(size=(devices, size)), masks)

    @property
    def best(self) -> np.ndarray:
        return np.asarray((self.curvature * self.optima).mean(0) / self.curvature.mean(0))

    def losses(self, w: np.ndarray) -> np.ndarray:
        return np.asarray((self.curvature * (w - self.optima) ** 2).sum(1) / 2)

    def run(self, w: np.ndarray, rates: Sequence[float], steps: int) -> Trace:
        """Return the models, and the constants Omega, Upsilon and G^2 of this trajectory."""
        models, omega, upsilon, largest = [w], 0.0, 0.0, 0.0
        for eta in rates:
            gap = self.losses(w) - self.losses(self.best)
            upsilon = max(upsilon, abs(float(gap.min())))
            local = np.tile(w, (len(self.masks), 1))
            for _ in range(steps):
                own = self.curvature * (local - self.optima)
                omega = max(omega, float(np.abs(((self.best - local) * own).min(1)).max()))
                largest = max(largest, float(((self.masks * own) ** 2).sum(1).max()))
                local = local - eta * self.masks * own
            w = (self.masks / self.masks.sum(0) * local).sum(0)
            models.append(w)
        return Trace(models, omega, upsilon, largest)

    def lemma_2(self, trace: Trace, steps: int) -> tuple[float, float, float]:
        """Return q_0, q_1 and q_2 of (12) to (14), without noise."""
        devices, size = self.masks.shape
        gamma = gammas(self.masks)
        total, mu, smooth = float(gamma.sum()), self.curvature.min(), self.curvature.max()
        unequal = bias(np.ones(size), self.masks)
        q1 = 2 * steps * (trace.upsilon * (total - 1) + trace.omega * unequal)
        drift = trace.largest * steps * (steps - 1) * (2 * steps - 1) / 6 * (2 + mu) * total
        spread = gamma * (2 + devices * steps * gamma) * self.losses(self.best)  # f_n* = 0
        return mu * steps * total / 2, q1, drift + 2 * smooth * steps * float(spread.sum())


@dataclass
class Trace:
    models: list[np.ndarray]
    omega: float
    upsilon: float
    largest: float


@pytest.mark.parametrize("steps", [1, 3])
def test_lemma_2_is_not_violated_on_quadratics_although_it_rests_on_lemma_3(steps: int) -> None:
    draw = np.random.default_rng(4)
    for _ in range(100):
        fleet = Quadratics.drawn(draw)
        eta = 1 / (fleet.curvature.max() * (len(fleet.masks) * steps + 1))  # the largest allowed
        trace = fleet.run(draw.normal(scale=3.0, size=5), [eta] * 20, steps)
        q0, q1, q2 = fleet.lemma_2(trace, steps)
        delta = np.array([((w - fleet.best) ** 2).sum() for w in trace.models])
        assert (delta[1:] <= (1 - q0 * eta) * delta[:-1] + q1 * eta + q2 * eta**2).all()


@pytest.mark.parametrize("full", [False, True], ids=["masks", "no masks"])
def test_theorem_2_is_not_violated_and_without_masks_reaches_the_optimum(full: bool) -> None:
    """Remark 3: with full masks q_1 = 0. Remark 2: with masks the limit is not the optimum."""
    draw = np.random.default_rng(5)
    steps, rounds, smooth = 2, 2000, 2.0
    for _ in range(5):
        fleet = Quadratics.drawn(draw, full=full)
        devices = len(fleet.masks)
        q0 = fleet.curvature.min() * steps * float(gammas(fleet.masks).sum()) / 2
        kappa = 2 * smooth / q0 * (devices * steps + 1)
        start = draw.normal(scale=3.0, size=5)
        rates = [2 / (q0 * (t + kappa)) for t in range(1, rounds + 1)]
        trace = fleet.run(start, rates, steps)
        _, q1, q2 = fleet.lemma_2(trace, steps)
        least = float(fleet.losses(fleet.best).mean())
        gap = np.array([fleet.losses(w).mean() - least for w in trace.models])
        first = float(((start - fleet.best) ** 2).sum())
        past = np.arange(len(gap)) + 1 + kappa
        bound = smooth * q1 / q0 + smooth / (2 * past) * (4 * q2 / q0**2 + (kappa + 1) * first)
        assert (gap <= bound).all()
        if full:
            assert q1 == pytest.approx(0.0, abs=1e-12)
            assert gap[-1] < 1e-3 * gap[0]
            assert gap[-1] * past[-1] < 2 * gap[len(gap) // 2] * past[len(gap) // 2]  # O(1/T)
        else:
            assert gap[-1] > 1e-3
