"""Least squares on supports, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from parsifl.core.problem import Restricted
from parsifl.linear.datafits import SQUARED_HALF
from parsifl.solvers.least_squares import least_squares, solve_symmetric


def _part(columns: Tensor, targets: Tensor, start: Tensor, ridge: float = 0.0) -> Restricted:
    clients, rows, _ = columns.shape
    return Restricted(
        columns=columns,
        targets=targets,
        weight=torch.full((clients, rows), 1 / rows, dtype=torch.float64),
        rows=torch.full((clients,), rows),
        ridge=torch.full_like(start, ridge),
        start=start,
        loss=SQUARED_HALF.loss,
        slope=SQUARED_HALF.slope,
        curvature=SQUARED_HALF.curvature,
        scale=1.0,
    )


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def test_it_agrees_with_numpy_for_every_client_of_a_block() -> None:
    columns, targets = _random(3, 20, 6), _random(3, 20, seed=1)
    columns[1, :, 4] = 0.0  # an unused place
    found = least_squares(_part(columns, targets, torch.zeros(3, 6).double()))
    for client in range(3):
        expected = np.linalg.lstsq(columns[client], targets[client], rcond=None)[0]
        np.testing.assert_allclose(found[client], expected, atol=1e-13)


def test_ill_conditioned_columns_are_solved_as_well_as_by_svd() -> None:
    columns, truth = _random(2, 40, 8), _random(2, 8, seed=2)
    columns[0, :, 7] = columns[0, :, 6] + 1e-7 * columns[0, :, 5]
    targets = (columns @ truth[..., None])[..., 0]
    found = least_squares(_part(columns, targets, torch.zeros(2, 8).double()))
    residual = (columns @ found[..., None])[..., 0] - targets
    assert float(residual.abs().max()) < 1e-13
    np.testing.assert_allclose(found[1], truth[1], atol=1e-13)


def test_nearly_parallel_columns_are_refined() -> None:
    columns, truth = _random(3, 60, 8), _random(3, 8, seed=2)
    for client, gap in enumerate((1e-3, 1e-2, 1.0)):
        columns[client, :, 7] = columns[client, :, 6] + gap * columns[client, :, 7]
    targets = (columns @ truth[..., None])[..., 0]
    found = least_squares(_part(columns, targets, torch.zeros(3, 8).double()))
    residual = (columns @ found[..., None])[..., 0] - targets
    assert float(residual.abs().max()) < 1e-14
    np.testing.assert_allclose(found, truth, atol=2e-11)


def test_a_known_predictor_is_not_computed_again() -> None:
    columns, targets, start = _random(2, 20, 6), _random(2, 20, seed=1), _random(2, 6, seed=2)
    part = _part(columns, targets, start)
    u = (columns @ start[..., None])[..., 0]
    known = least_squares(replace(part, u=u))
    torch.testing.assert_close(known, least_squares(part), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [4, 30])
def test_of_many_minimisers_the_nearest_to_the_start_is_taken(rows: int) -> None:
    columns, start = _random(2, rows, 6), _random(2, 6, seed=3)
    columns[:, :, 5] = columns[:, :, 4]  # equal columns: never unique, however many rows
    targets = _random(2, rows, seed=4)
    found = least_squares(_part(columns, targets, start))
    for client in range(2):
        matrix = columns[client].numpy()
        residual = targets[client].numpy() - matrix @ start[client].numpy()
        nearest = start[client].numpy() + np.linalg.pinv(matrix) @ residual
        np.testing.assert_allclose(found[client], nearest, atol=1e-11)


def test_the_ridge_pulls_to_zero_not_to_the_start() -> None:
    columns, targets, start = _random(1, 10, 3), _random(1, 10, seed=1), _random(1, 3, seed=2)
    found = least_squares(_part(columns, targets, start, ridge=0.5))[0].numpy()
    matrix = columns[0].numpy()
    system = matrix.T @ matrix / 10 + 0.5 * np.eye(3)
    expected = np.linalg.solve(system, matrix.T @ targets[0].numpy() / 10)
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_an_empty_support_has_an_empty_solution() -> None:
    nothing = torch.zeros(2, 0, 0)
    assert solve_symmetric(nothing, torch.zeros(2, 0)).shape == (2, 0)


def test_single_precision_is_as_exact_as_it_can_be_where_columns_are_alike() -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.linalg.qr(torch.randn(200, 2, generator=draw))[0].T
    matrix = torch.stack([first, first + 0.1 * second], 1)  # a sine of about 0.1
    truth = torch.tensor([1.0, -2.0])
    found = least_squares(_part(matrix[None], (matrix @ truth)[None], torch.zeros(1, 2)))
    exact = torch.linalg.lstsq(matrix.double(), (matrix @ truth).double()[:, None]).solution[:, 0]
    assert (found[0].double() - exact).abs().max() < 5e-6  # eps / 0.1^2 alone would be 1.2e-5


@pytest.mark.parametrize("seed", range(5))
def test_single_precision_sees_that_rows_are_too_few(seed: int) -> None:
    """A client with fewer rows than columns, padded to the rows of its block."""
    columns, targets = _random(1, 9, 6, seed=seed).float(), _random(1, 9, seed=seed + 1).float()
    columns[:, 5:], targets[:, 5:] = 0.0, 0.0
    found = least_squares(_part(columns, targets, torch.zeros(1, 6)))
    shortest = np.linalg.pinv(columns[0, :5].double().numpy()) @ targets[0, :5].double().numpy()
    np.testing.assert_allclose(found[0].numpy(), shortest, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_weight_zero_do_not_count(alone: bool) -> None:
    columns, targets = _random(2, 20, 4), _random(2, 20, seed=1)
    part = _part(columns, targets, torch.zeros(2, 4).double())
    weight = part.weight.clone()
    weight[0] = 0.0
    if not alone:
        weight[1, 5:] = 0.0
    found = least_squares(replace(part, weight=weight))
    assert not found[0].any()
    used = slice(None) if alone else slice(5)
    expected = np.linalg.lstsq(columns[1, used], targets[1, used], rcond=None)[0]
    np.testing.assert_allclose(found[1], expected, atol=1e-12)
