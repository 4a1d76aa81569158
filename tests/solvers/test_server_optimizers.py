"""Server optimizers against the equations of their papers in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from parsifl.solvers.server_optimizers import SERVER_OPTIMIZERS, Adagrad, Adam, Sgd, Yogi

Array = npt.NDArray[np.float64]
LR, BETA1, BETA2, TAU = 0.3, 0.8, 0.95, 0.02


def adaptive(second: Callable[[Array, Array], Array], start: float) -> Callable[..., list[Array]]:
    """Return Algorithm 2 of Reddi et al. with one rule for the second moment."""

    def trajectory(w: Array, means: list[Array]) -> list[Array]:
        m, v, steps = np.zeros_like(w), np.full_like(w, start), []
        for mean in means:
            d = mean - w
            m = BETA1 * m + (1 - BETA1) * d
            v = second(v, d)
            w = w + LR * m / (np.sqrt(v) + TAU)
            steps.append(w)
        return steps

    return trajectory


def momentum(w: Array, means: list[Array]) -> list[Array]:
    """FedAvgM of Hsu et al."""
    u, steps = np.zeros_like(w), []
    for mean in means:
        u = BETA1 * u + (mean - w)
        w = w + LR * u
        steps.append(w)
    return steps


REFERENCES: dict[str, tuple[Any, Callable[..., list[Array]]]] = {
    "adam": (
        Adam(lr=LR, beta1=BETA1, beta2=BETA2, tau=TAU),
        adaptive(lambda v, d: BETA2 * v + (1 - BETA2) * d**2, 0.0),
    ),
    "yogi": (
        Yogi(lr=LR, beta1=BETA1, beta2=BETA2, tau=TAU),
        adaptive(lambda v, d: v - (1 - BETA2) * d**2 * np.sign(v - d**2), TAU**2),
    ),
    "adagrad": (
        Adagrad(lr=LR, beta1=BETA1, tau=TAU),
        adaptive(lambda v, d: v + d**2, TAU**2),
    ),
    "sgd": (Sgd(lr=LR, momentum=BETA1), momentum),
}


def test_every_server_optimizer_has_a_reference() -> None:
    assert set(REFERENCES) == set(SERVER_OPTIMIZERS.names())


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_the_steps_are_those_of_the_equations(name: str) -> None:
    optimizer, reference = REFERENCES[name]
    assert type(optimizer) is SERVER_OPTIMIZERS.find(name)
    draw = np.random.default_rng(0)
    start = draw.normal(size=6)
    # large and small changes in turn: the second moment of Yogi grows and shrinks
    means = [draw.normal(scale=scale, size=6) for scale in (1.0, 3.0, 0.01, 0.1, 2.0)]
    params = {"w": torch.from_numpy(start)}
    state = optimizer.init(params)
    for mean, expected in zip(means, reference(start, means), strict=True):
        params, state = optimizer.step(params, {"w": torch.from_numpy(mean)}, state)
        assert params["w"].numpy() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_the_first_step_of_adagrad_has_no_momentum_by_default() -> None:
    params = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    moved, _ = Adagrad(lr=1.0, tau=1e-9).step(
        params, {"w": torch.tensor([4.0, -2.5], dtype=torch.float64)}, Adagrad().init(params)
    )
    assert moved["w"].tolist() == pytest.approx([2.0, -3.0], rel=1e-4)
