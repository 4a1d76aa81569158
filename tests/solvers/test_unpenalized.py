"""Rules exempt positions parameter by parameter, in problems with several tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parsifl import NeuralProblem, simulate
from parsifl.algorithms import FedIterHT, FedMac, FedMid, PFedMe

EXEMPT = (0, 4)  # 4 lies beyond the last axis of every other parameter


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


class Exempting(NeuralProblem):  # type: ignore[misc]  # final
    """Two inputs of the first layer are exempt; the other parameters are not."""

    @property
    def unpenalized(self) -> Mapping[str, tuple[int, ...]]:
        return {"0.weight": EXEMPT}


def clients() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=(30, 5)).astype("f4") for _ in range(3)]
    return [(x, np.stack([x[:, 0] + x[:, 4], x[:, 4]], 1)) for x in rows]


@pytest.mark.parametrize("engine", ["loop", "vmap", "fused"])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedMac(l1="proximal", gamma=6.0),
        FedMac(l1="proximal", gamma=6.0, inner=3),
        FedMac(l1="proximal", gamma=6.0, inner=3, accuracy=1e-9),
        FedMac(l1="proximal", gamma=6.0, momentum=0.5),
        PFedMe(lr=0.05, outer_lr=0.02, lam=15.0, l1="proximal", gamma=60.0, inner=1),
        FedMid(lr=0.05, lam=6.0),
        FedMid(lr=0.05, lam=6.0, momentum=0.5),
    ],
    ids=["fedmac", "inner", "accuracy", "momentum", "pfedme", "fedmid", "fedmid-momentum"],
)
def test_an_l1_norm_spares_the_exempt_positions_of_their_own_parameter_only(
    algorithm: Any, engine: Any
) -> None:
    problem = Exempting(network, loss="mse")
    done = simulate(algorithm, problem, clients(), 5, executor=engine, evaluate_every=0)
    found = done.personal(0).params
    kept = torch.zeros(5, dtype=torch.bool)
    kept[list(EXEMPT)] = True
    assert bool((found["0.weight"][:, kept] != 0).all())
    assert not found["0.weight"][:, ~kept].any()
    for name in ("0.bias", "2.weight", "2.bias"):
        assert not found[name].any(), name


@pytest.mark.parametrize("engine", ["loop", "vmap", "fused"])
def test_a_smoothed_norm_spares_the_exempt_positions_only(engine: Any) -> None:
    algorithm = FedMac(lr=0.01, gamma=6.0, rho=0.1)
    problem = Exempting(network, loss="mse")
    done = simulate(algorithm, problem, clients(), 20, executor=engine, evaluate_every=0)
    found = done.personal(0).params
    assert float(found["0.weight"][:, list(EXEMPT)].abs().max()) > 0.2
    assert float(found["0.weight"][:, 1:4].abs().max()) < 0.05
    assert float(found["2.weight"].abs().max()) < 0.05


@pytest.mark.parametrize("engine", ["loop", "vmap", "fused"])
@pytest.mark.parametrize("scope", ["layer", "row"])
def test_hard_thresholding_spares_the_exempt_positions_of_their_own_parameter_only(
    scope: Any, engine: Any
) -> None:
    algorithm = FedIterHT(lr=0.05, tau=1, scope=scope)
    problem = Exempting(network, loss="mse")
    done = simulate(algorithm, problem, clients(), 5, executor=engine, evaluate_every=0)
    first, second = done.server["0.weight"], done.server["2.weight"]
    assert bool((first[:, list(EXEMPT)] != 0).all())
    assert int((first != 0).sum()) == 6 + (3 if scope == "row" else 1)
    assert int((second != 0).sum()) == (2 if scope == "row" else 1)
