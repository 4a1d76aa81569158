"""Dense and CSR designs give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from parsifl.linear import design
from parsifl.linear.design import CsrDesign

DRAW = np.random.default_rng(0)
MATRIX = DRAW.standard_normal((7, 5)) * (DRAW.random((7, 5)) < 0.5)
DESIGNS: dict[str, design.Design] = {
    "dense": torch.from_numpy(MATRIX),
    "csr": CsrDesign(sp.csr_matrix(MATRIX)),
}


@pytest.fixture(params=sorted(DESIGNS))
def x(request: pytest.FixtureRequest) -> design.Design:
    return DESIGNS[request.param]


def test_products_with_vectors_and_matrices(x: design.Design) -> None:
    v, w = DRAW.standard_normal(5), DRAW.standard_normal((3, 5))
    np.testing.assert_allclose(design.matvec(x, torch.from_numpy(v)), MATRIX @ v)
    np.testing.assert_allclose(design.matvec(x, torch.from_numpy(w)), MATRIX @ w.T)
    r, many = DRAW.standard_normal(7), DRAW.standard_normal((7, 3))
    np.testing.assert_allclose(design.rmatvec(x, torch.from_numpy(r)), MATRIX.T @ r)
    np.testing.assert_allclose(design.rmatvec(x, torch.from_numpy(many)), many.T @ MATRIX)


def test_products_can_be_differentiated(x: design.Design) -> None:
    v = torch.from_numpy(DRAW.standard_normal(5))
    slope = torch.func.grad(lambda u: design.matvec(x, u).square().sum())(v)
    np.testing.assert_allclose(slope, 2 * MATRIX.T @ (MATRIX @ v.numpy()))


def test_rows_of_a_block_of_clients_are_read_by_number(x: design.Design) -> None:
    rows = np.array([[0, 2, 4], [6, 1, 1]])
    values = DRAW.standard_normal((2, 3))
    found = design.combine(x, torch.from_numpy(rows), torch.from_numpy(values))
    expected = [values[i] @ MATRIX[rows[i]] for i in range(2)]
    np.testing.assert_allclose(found, expected)
    many = DRAW.standard_normal((2, 3, 4))
    found = design.combine(x, torch.from_numpy(rows), torch.from_numpy(many))
    np.testing.assert_allclose(found, [many[i].T @ MATRIX[rows[i]] for i in range(2)])


@pytest.mark.parametrize(
    "numbers",
    [
        [[0, 2, 4], [6, 1, 1]],
        [[0, 1, 2], [4, 5, 6]],  # one after the other
        [[1, 2, 3], [2, 3, 4]],
        [[4, 5, 6], [0, 1, 2]],  # backwards
        [[0, 1, 2], [3, 4, 3]],  # padded
    ],
)
def test_columns_of_a_block_of_clients(x: design.Design, numbers: list[list[int]]) -> None:
    rows, index = np.array(numbers), np.array([[1, 4], [0, 3]])
    found = design.columns(x, torch.from_numpy(rows), torch.from_numpy(index))
    expected = [MATRIX[np.ix_(rows[i], index[i])] for i in range(2)]
    np.testing.assert_allclose(found, expected)


def test_columns_of_a_design_that_is_a_part_of_the_columns_of_a_larger_one() -> None:
    rows, index = np.array([[0, 2, 4], [6, 1, 1]]), np.array([[1, 3], [0, 2]])
    found = design.columns(torch.from_numpy(MATRIX)[:, 1:], *map(torch.from_numpy, (rows, index)))
    expected = [MATRIX[:, 1:][np.ix_(rows[i], index[i])] for i in range(2)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("support", [0, 1, 5])
def test_products_through_the_support_equal_full_products(x: design.Design, support: int) -> None:
    rows = torch.tensor([[0, 2, 4], [6, 1, 1]])
    v = np.zeros((2, 5))
    v[0, :support] = 1.5
    found = design.products(x, rows, torch.from_numpy(v))
    np.testing.assert_allclose(found, [MATRIX[rows[i].numpy()] @ v[i] for i in range(2)])


def test_columns_of_a_design_that_is_part_of_a_larger_one() -> None:
    whole = torch.arange(60.0).reshape(10, 6)
    rows, index = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 4], [0, 5]])
    found = design.columns(whole[4:], rows, index)
    assert torch.equal(found, design.columns(whole[4:].clone(), rows, index))
    assert found[0, 0].tolist() == [25.0, 28.0]
