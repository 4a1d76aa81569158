from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl.solvers.thresholding import SoftThresholdRule
from parsifl.solvers.update_rules import LinearRule, Rule

SEEDS = st.integers(0, 99)


def numbers(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)


@given(SEEDS)
def test_the_plain_rule_changes_nothing(seed: int) -> None:
    w = numbers(seed)
    Rule().before_(w, (), 0.1)
    Rule().after_(w, (), 0.1)
    assert torch.equal(w, numbers(seed))
    assert not Rule.moves_aux


@given(SEEDS, st.floats(0, 5), st.floats(0.01, 1))
def test_affine_subtracts_decay_and_offset_at_the_old_point(
    seed: int, decay: float, lr: float
) -> None:
    w, aux = numbers(seed), numbers(seed + 1)
    wanted = w - lr * (decay * w + aux)
    LinearRule(decay).before_(w, (aux,), lr)
    assert torch.allclose(w, wanted, rtol=1e-13, atol=1e-14)
    assert torch.equal(aux, numbers(seed + 1))


@given(SEEDS, st.floats(0, 3), st.floats(0.01, 1))
def test_soft_thresholding_is_the_proximal_operator(seed: int, strength: float, lr: float) -> None:
    v = numbers(seed)
    w = v.clone()
    SoftThresholdRule(strength).after_(w, (), lr)

    def objective(point: Tensor) -> Tensor:
        return 0.5 * (point - v).square() + lr * strength * point.abs()

    best = objective(w)
    for other in (w + 1e-3, w - 1e-3, torch.zeros_like(w), v):
        assert bool((objective(other) >= best - 1e-12).all())
    assert bool((w[v.abs() <= lr * strength] == 0).all())
