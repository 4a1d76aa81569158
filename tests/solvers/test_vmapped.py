from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from parsifl.core.problem import Params
from parsifl.solvers import vmapped


def loss(params: Params) -> Tensor:
    hidden = (params["w"] @ torch.linspace(-1, 1, 3, dtype=torch.float64) + params["b"]).tanh()
    return (hidden**2).sum()


def block(seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 2, 3), "b": (4, 2), "unused": (4, 5)}
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}


def test_it_is_the_gradient_that_torch_finds() -> None:
    params = block(0)
    found = vmap(lambda one: vmapped.gradient(loss, one))(params)
    expected = vmap(grad(loss))(params)
    for name, slope in expected.items():
        assert torch.equal(found[name], slope)
        assert not found[name].requires_grad


def test_a_loss_that_raises_leaves_no_transformation_behind() -> None:
    def broken(params: Params) -> Tensor:
        raise ArithmeticError(len(params))

    with pytest.raises(ArithmeticError):
        vmap(lambda one: vmapped.gradient(broken, one))(block(0))
    assert not vmapped.inside_vmap()
    assert torch.equal(vmap(torch.neg)(torch.ones(3)), -torch.ones(3))


def test_only_the_one_vmap_over_clients_counts() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(vmapped.inside_vmap())
        return x.sum()

    look(torch.ones(2))
    vmap(look)(torch.ones(2, 2))
    vmap(grad(look))(torch.ones(2, 2))
    vmap(vmap(look))(torch.ones(2, 2, 2))
    assert seen == [False, True, False, False]


def test_a_loss_of_nothing_has_no_slope() -> None:
    found = vmap(lambda one: vmapped.gradient(lambda _: torch.ones(()), one))(block(0))
    assert all(not slope.any() for slope in found.values())
    assert vmap(lambda x: x + len(vmapped.gradient(lambda _: x, {})))(torch.ones(2)).tolist() == [
        1.0,
        1.0,
    ]
