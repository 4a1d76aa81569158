"""The inner solvers reach the same minimiser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor

from parsifl.core.problem import Restricted
from parsifl.linear import datafits
from parsifl.solvers import restricted
from parsifl.solvers.least_squares import solve_symmetric


def _part(name: str, ridge: float = 0.1, clients: int = 2) -> Restricted:
    draw, fit = np.random.default_rng(5), datafits.DATAFITS.find(name)
    classes, width = (3, 7) if name == "softmax" else (1, 4)
    columns = torch.from_numpy(draw.standard_normal((clients, 40, width)))
    labels = draw.integers(0, max(2, classes), (clients, 40))
    targets = labels if fit.classes else draw.standard_normal((clients, 40))
    start = torch.zeros(*((clients, 3, 4) if classes > 1 else (clients, 4))).double()
    overlapping = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 6], [0, 5, 6, 7]])  # 7: an unused place
    return Restricted(
        columns=columns,
        targets=torch.from_numpy(targets),
        weight=torch.full((clients, 40), 1 / 40).double(),
        rows=torch.full((clients,), 40),
        ridge=torch.full_like(start, ridge),
        start=start,
        loss=fit.loss,
        slope=fit.slope,
        curvature=fit.curvature,
        scale=fit.smoothness if fit.quadratic else None,
        places=overlapping.expand_as(start) if classes > 1 else None,
    )


def _one(part: Restricted, client: int) -> Restricted:
    here = slice(client, client + 1)
    return replace(
        part,
        columns=part.columns[here],
        targets=part.targets[here],
        weight=part.weight[here],
        rows=part.rows[here],
        ridge=part.ridge[here],
        start=part.start[here],
        places=None if part.places is None else part.places[here],
    )


def _by_scipy(part: Restricted) -> list[Tensor]:
    found = []
    for client in range(len(part.start)):
        alone = _one(part, client)
        shape = alone.start.shape

        def value(z: np.ndarray, alone: Restricted = alone, shape: torch.Size = shape) -> float:
            return float(restricted.loss(alone, torch.from_numpy(z).reshape(shape)))

        best = scipy_minimize(value, alone.start.flatten().numpy(), method="BFGS", tol=1e-9)
        found.append(torch.from_numpy(best.x).reshape(shape)[0])
    return found


@pytest.mark.parametrize("name", ["squared", "squared-half", "logistic", "softmax"])
def test_the_exact_minimiser_is_that_of_a_general_optimiser(name: str) -> None:
    part = _part(name)
    found = restricted.minimize(part)
    torch.testing.assert_close(found, torch.stack(_by_scipy(part)), atol=1e-5, rtol=1e-5)
    assert float(restricted.gradient(part, found).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["squared", "logistic", "softmax"])
def test_gradient_and_hessian_are_derivatives(name: str) -> None:
    part = _one(_part(name), 0)
    z = torch.from_numpy(np.random.default_rng(0).standard_normal(part.start.shape))
    slope = torch.func.grad(lambda v: restricted.loss(part, v)[0])(z)
    torch.testing.assert_close(restricted.gradient(part, z), slope)
    columns = []
    for way in torch.eye(z.numel()).double():
        step = 1e-5 * way.reshape(z.shape)
        rise = restricted.gradient(part, z + step) - restricted.gradient(part, z - step)
        columns.append(rise.flatten() / 2e-5)
    curve = torch.stack(columns, 1)
    torch.testing.assert_close(restricted.hessian(part, z)[0], curve, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["squared-half", "logistic", "softmax"])
def test_iterative_solvers_approach_it(name: str) -> None:
    part = _part(name)
    best = restricted.minimize(part)
    key = torch.tensor([3, 4])
    found = {
        "gd": restricted.gradient_descent(part, steps=400),
        "newton": restricted.newton(part, 1e-9, 30),
        "svrg": restricted.svrg(part, key, batch=5, steps=1500, every=30),
        "sgd": restricted.stochastic_gradient(part, key, batch=20, lr=0.05, steps=600),
    }
    tolerance = {"gd": 1e-8, "newton": 1e-8, "svrg": 1e-3, "sgd": 0.1}
    for solver, z in found.items():
        assert float((z - best).abs().max()) < tolerance[solver], solver


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 50])
def test_steps_at_once_are_those_one_by_one(rows: int, ridge: float, steps: int) -> None:
    part = _part("squared", ridge=ridge)
    part = replace(
        part,
        columns=part.columns[:, :rows],
        targets=part.targets[:, :rows],
        weight=part.weight[:, :rows],
        u=None,
    )
    rate, z = 1 / restricted.curvatures(part)[0][:, None], part.start
    for _ in range(steps):
        z = z - rate * restricted.gradient(part, z)
    found = restricted.gradient_descent(part, steps=steps)
    torch.testing.assert_close(found, z, atol=1e-13, rtol=1e-12)


def test_delta_stops_a_client_that_hardly_moves() -> None:
    part = _part("squared-half")
    settled = replace(part, start=torch.stack([restricted.minimize(part)[0], part.start[1]]))
    found = restricted.gradient_descent(settled, delta=1e-6, steps=50)
    assert torch.equal(found[0], settled.start[0])
    assert not torch.equal(found[1], settled.start[1])
    loose = restricted.gradient_descent(part, delta=1e-2, steps=500)
    tight = restricted.gradient_descent(part, delta=1e-10, steps=500)
    best = restricted.minimize(part)
    assert float((tight - best).norm()) < 1e-6 < float((loose - best).norm()) < 2e-2


@pytest.mark.parametrize("name", ["squared-half", "squared"])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_delta_is_the_distance_to_the_minimizer(name: str, ridge: float) -> None:
    """Also where the problem is ill-conditioned, and steps are far shorter than the distance."""
    part = _part(name, ridge=ridge)
    scales = torch.logspace(0, -1.5, part.columns.shape[-1]).double()
    hard = replace(part, columns=part.columns * scales)
    for delta in (1e-1, 1e-4):
        found = restricted.gradient_descent(hard, delta, 100_000)
        assert (0.01 if ridge else 0.5) * delta < _distance(hard, found) <= delta
        found = restricted.svrg(part, torch.tensor([3, 4]), 5, delta, 20_000, every=100)
        assert _distance(part, found) <= delta


def _distance(part: Restricted, found: torch.Tensor) -> float:
    return float((found - restricted.minimize(part)).flatten(1).norm(dim=1).max())


def test_a_client_gets_the_same_numbers_alone_as_in_a_block() -> None:
    part, key = _part("logistic", clients=3), torch.tensor([7, 8, 9])
    together = restricted.svrg(part, key, batch=4, steps=20)
    alone = [restricted.svrg(_one(part, i), key[i : i + 1], batch=4, steps=20)[0] for i in range(3)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_newton_does_not_move_clients_that_have_arrived(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _part(name, clients=3)
    part.columns[1] = 0.0  # arrives at once
    moved, hessian = list[int](), restricted.hessian

    def counted(some: Restricted, z: Tensor) -> Tensor:
        moved.append(len(z))
        return hessian(some, z)

    monkeypatch.setattr(restricted, "hessian", counted)
    together = restricted.newton(part, 1e-9)
    block = moved.copy()
    moved.clear()
    alone = torch.cat([restricted.newton(_one(part, client), 1e-9) for client in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)
    assert sum(block) == sum(moved)
    assert block[1] == 2


def test_newton_solves_few_large_systems_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = _part("softmax", clients=5)
    expected = restricted.newton(part)
    monkeypatch.setattr(restricted, "_ENTRIES", 2 * (3 * 4) ** 2)
    solved = list[int]()

    def counted(system: Tensor, right: Tensor) -> Tensor:
        solved.append(len(system))
        return solve_symmetric(system, right)

    monkeypatch.setattr(restricted, "solve_symmetric", counted)
    torch.testing.assert_close(restricted.newton(part), expected, rtol=0, atol=1e-14)
    assert solved[:3] == [2, 2, 1]


def test_an_empty_support_has_an_empty_minimiser() -> None:
    part = _part("logistic")
    empty = replace(
        part, columns=part.columns[..., :0], ridge=part.ridge[:, :0], start=part.start[:, :0]
    )
    assert restricted.minimize(empty).shape == (2, 0)


def test_separable_classes_without_ridge_end_at_a_finite_point() -> None:
    part = _part("logistic", ridge=0.0)
    split = replace(part, targets=(part.columns[..., 0] > 0).long())
    found = restricted.minimize(split)
    assert torch.isfinite(found).all()
    assert float(restricted.loss(split, found).max()) < 1e-3


@pytest.mark.parametrize("name", ["squared-half", "logistic"])
def test_svrg_converges_in_spite_of_a_heavy_row(name: str) -> None:
    part = _part(name)
    weight = torch.ones(2, 40).double()
    weight[0, 3], weight[1, :5] = 500.0, 0.0
    part = replace(part, weight=weight / weight.sum(1, keepdim=True))
    key = torch.tensor([3, 9])
    found = restricted.svrg(part, key, batch=1, steps=3000)
    torch.testing.assert_close(found, restricted.minimize(part), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["squared-half", "softmax"])
def test_rows_of_unequal_weight_are_drawn_without_bias(name: str) -> None:
    part = _part(name)
    weight = torch.ones(2, 40).double()
    weight[0, 3], weight[0, 7:9] = 20.0, 0.0  # the second client: equal weights
    part = replace(part, weight=weight / weight.sum(1, keepdim=True))
    squares = restricted._squares(part)
    some = restricted._sample(part, squares, torch.tensor([3, 9]), 20000, 0)
    found, exact = (restricted.gradient(which, part.start) for which in (some, part))
    torch.testing.assert_close(found, exact, rtol=0, atol=0.03)
    rows = (some.columns[:, :, None] == part.columns[:, None]).all(-1).double().mean(1)
    shares = part.weight * squares / (part.weight * squares).sum(1, keepdim=True)
    torch.testing.assert_close(rows[0], shares[0], rtol=0, atol=0.01)
    assert not rows[0, 7:9].any()
    alone = _one(_part(name), 1)
    again = restricted._sample(alone, squares[1:], torch.tensor([9]), 20000, 0)
    assert torch.equal(again.columns[0], some.columns[1])


def test_no_drawn_row_bends_more_than_the_step_of_svrg_allows() -> None:
    part = _part("squared")
    weight = torch.ones(2, 40).double()
    weight[:, 0] = 500.0  # one heavy row
    part = replace(part, weight=weight / weight.sum(1, keepdim=True))
    limit = restricted.row_smoothness(part)
    for step in range(200):
        drawn = restricted._sample(part, restricted._squares(part), torch.tensor([3, 4]), 1, step)
        assert bool((restricted.curvatures(drawn)[0] <= limit * (1 + 1e-9)).all())
