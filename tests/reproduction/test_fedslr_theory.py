"""FedSLR's statements as numerical tests, with the smallest counter-examples.

Local problems are solved exactly. `tests/algorithms/test_fedslr.py` has the duals (25) and the
potential of Definition 1 with the library's own steps.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    mean = np.mean([slope(i, w) for i in range(CLIENTS)], axis=0)
    free = np.maximum(np.abs(mean) - LAM, 0.0)
    return float(np.linalg.norm(np.where(w != 0, mean + LAM * np.sign(w), free)))


@pytest.mark.parametrize("factor", [0.5, 0.9, 3.0, 20.0])
def test_theorem_1_holds_also_for_steps_beyond_its_bound(factor: float) -> None:
    """eta_g <= 1 / (2 L) is sufficient, not needed."""
    *_, (w, _) = walk(factor / (2 * L), 600)
    assert mapping(w) < 1e-8


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
        local = _root(power, gamma, w, eta)
        gamma += (w - local) / eta
        w = local - eta * gamma
        found.append(abs(w) ** (power - 1))
    first, last = 400, len(found)
    rate = -np.log(found[-1] / found[first - 1]) / np.log(last / first)
    assert 1 / (4 * theta - 2) < rate < 4 * theta - 2


def _root(power: int, gamma: float, w: float, eta: float) -> float:
    """Return the minimizer of the local problem (4)."""
    low, high = -2.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if middle ** (power - 1) - gamma + (middle - w) / eta < 0
            else (low, middle)
        )
    return (low + high) / 2


def test_theorem_3_squared_mappings_are_summable() -> None:
    """T times the mean of the squared mapping is bounded: O(1/T)."""
    squares = np.array([mapping(w) ** 2 for w, _ in walk(1 / (2 * L), 300)])
    sums = squares.cumsum()
    assert sums[-1] < 1.01 * sums[99]
