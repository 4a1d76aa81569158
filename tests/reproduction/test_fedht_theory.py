"""Fed-HT's statements as numerical tests, with the smallest counter-examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parsifl.algorithms.fedht import FedHT
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.data.datasets.simulated import fedht_regression
from parsifl.engine.simulate import simulate
from parsifl.linear.glm import GLM


def limit(kind: Any, rows: list[Any], steps: int, tau: int, lr: float, rounds: int) -> Any:
    method = kind(tau=tau, local_steps=steps, lr=lr, full_batch=True, weighting="uniform")
    problem = GLM(rows[0][0].shape[1], "squared-half")
    done = simulate(method, problem, rows, rounds, test=0.0, evaluate_every=0)
    return done.server["coef"].numpy()


def test_theorem_3_1_speaks_of_interpolation_only() -> None:
    """Two clients with curvatures 10 and 1 on one coordinate: grad f(x*) = 0, so g_1 = 0.

    The theorem then promises convergence to x*. The limit is the mean of the optima weighted by
    1 - (1 - gamma c_i)^K, which is another point unless both optima agree. (Assumption 2 excludes
    the example: at x* it forces every client's gradient to vanish.)
    """
    kappa = 10.0
    z = np.sqrt(np.array([[[kappa]], [[1.0]]]))
    optima = np.array([1.0, 0.0])
    lr, steps = 1 / (6 * kappa), 20
    best = kappa / (kappa + 1)
    rows = [(z[i], z[i][:, 0] * optima[i]) for i in range(2)]
    found = limit(FedHT, rows, steps, 1, lr, 40)[0]
    shares = 1 - (1 - lr * np.array([kappa, 1.0])) ** steps
    assert found == pytest.approx(shares @ optima / shares.sum(), abs=1e-6)
    assert abs(found - best) > 0.05
    agreed = [(z[i], z[i][:, 0]) for i in range(2)]
    assert limit(FedHT, agreed, steps, 1, lr, 40)[0] == pytest.approx(1.0, abs=1e-6)


def test_the_sparsity_that_the_theorems_ask_for_is_never_met() -> None:
    """tau >= (16 (12 kappa - 1)^2 + 1) tau*: 1,937 times at kappa = 1."""
    assert 16 * (12 * 1 - 1) ** 2 + 1 == 1937


def test_both_converge_linearly_under_interpolation_and_fediterht_faster() -> None:
    draw = np.random.default_rng(0)
    truth = np.zeros(60)
    truth[:4] = 1.0
    rows = [(z, z @ truth) for z in (draw.normal(size=(120, 60)) for _ in range(6))]
    lr = 1 / (6 * max(float(np.linalg.norm(z, 2) ** 2) / len(z) for z, _ in rows))

    def error(kind: Any, rounds: int, steps: int = 10) -> float:
        return float(np.linalg.norm(limit(kind, rows, steps, 8, lr, rounds) - truth))

    ends = {kind: [error(kind, rounds) for rounds in (10, 20, 30)] for kind in (FedHT, FedIterHT)}
    for first, second, third in ends.values():
        assert second / first == pytest.approx(third / second, rel=0.2)  # one factor per round
        assert third < 0.1 * first
    assert ends[FedIterHT][-1] < ends[FedHT][-1]
    assert error(FedHT, 20, steps=20) < ends[FedHT][1]  # more local steps, smaller theta


def test_the_error_grows_with_heterogeneity() -> None:
    draw = np.random.default_rng(0)
    designs = [draw.normal(size=(40, 20)) * s for s in (0.3, 1.0, 2.0)]
    shifts = [draw.normal(size=20) for _ in designs]
    lr = 1 / (6 * max(float(np.linalg.norm(z, 2) ** 2) / len(z) for z in designs))
    truth = np.zeros(20)
    truth[:3] = 1.0
    errors = []
    for spread in (0.0, 0.3, 1.0):
        rows = [(z, z @ (truth + spread * s)) for z, s in zip(designs, shifts, strict=True)]
        hessian = sum(z.T @ z / len(z) for z in designs)
        right = sum(z.T @ y / len(z) for z, y in rows)
        pooled = np.linalg.solve(hessian, right)
        errors.append(float(np.linalg.norm(limit(FedHT, rows, 10, 20, lr, 100) - pooled)))
    assert errors[0] < 0.1 * errors[1]
    assert errors == sorted(errors)


def test_simulation_i_as_printed_favours_distributed_iht() -> None:
    """Local Hessians are nearly of rank one, with means of length |v_i|^2 ~ 1000.

    So a local step must stay far below that which the mean of all clients allows.
    """
    files: Any = None  # it reads none
    data = fedht_regression(files, clients=20, samples=30)
    x, owner = np.asarray(data.x, dtype=np.float64), np.asarray(data.groups)
    own = [x[owner == i] for i in np.unique(owner)]
    local = [float(np.linalg.norm(z, 2) ** 2) / len(z) for z in own]
    mean = float(np.linalg.norm(sum(z.T @ z / len(z) for z in own) / len(own), 2))
    assert min(local) > 5 * mean
