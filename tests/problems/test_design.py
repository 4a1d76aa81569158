"""Dense and CSR designs give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from parsifl.problems import design
from parsifl.problems.design import CsrDesign
from parsifl.work import Batches

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


def test_columns_of_a_block_of_clients(x: design.Design) -> None:
    rows, index = np.array([[0, 2, 4], [6, 1, 1]]), np.array([[1, 4], [0, 3]])
    found = design.columns(x, torch.from_numpy(rows), torch.from_numpy(index))
    expected = [MATRIX[np.ix_(rows[i], index[i])] for i in range(2)]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("support", [0, 1, 5])
def test_products_through_the_support_equal_full_products(x: design.Design, support: int) -> None:
    rows = torch.tensor([[0, 2, 4], [6, 1, 1]])
    v = np.zeros((2, 5))
    v[0, :support] = 1.5
    found = design.products(x, rows, torch.from_numpy(v))
    np.testing.assert_allclose(found, [MATRIX[rows[i].numpy()] @ v[i] for i in range(2)])


def _batches(x: CsrDesign, index: Tensor) -> Batches:
    weight = torch.ones(index.shape, dtype=torch.float64)
    active = torch.ones(len(index), dtype=torch.bool)
    y = torch.arange(7, dtype=torch.float64)
    return Batches(x, y, index, weight, active, torch.tensor(0))


def test_compacting_keeps_touched_columns_and_the_products() -> None:
    sparse = np.zeros((4, 100))
    sparse[0, 3], sparse[1, 50], sparse[2, 3], sparse[3, 99] = 1.0, 2.0, 3.0, 4.0
    batches = _batches(CsrDesign(sp.csr_matrix(sparse)), torch.tensor([[2, 0], [0, 1]]))
    small = design.compact(batches, torch.tensor([7]))
    assert small.columns.tolist() == [3, 7, 50]
    assert small.targets(0)[0].tolist() == [2.0, 0.0]
    identity = torch.eye(3, dtype=torch.float64)
    steps = [[[3.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]]
    for number, expected in enumerate(steps):
        rows = torch.tensor(expected, dtype=torch.float64)
        columns = [small.product(number, unit) for unit in identity]
        assert torch.equal(torch.stack(columns, dim=1), rows)
        assert torch.equal(small.product(number, identity), rows)
        back = [small.adjoint(number, unit) for unit in identity[:2, :2]]
        assert torch.equal(torch.stack(back), rows)
        assert torch.equal(small.adjoint(number, identity[:2, :2]), rows)


def test_a_csr_design_never_becomes_dense() -> None:
    wide = CsrDesign(sp.csr_matrix(([1.0, 2.0], ([0, 5], [0, 10**7])), shape=(6, 10**7 + 1)))
    batches = _batches(wide, torch.tensor([[0, 5]]))
    small = design.compact(batches, torch.zeros(0, dtype=torch.long))
    assert small.x.shape == (2, 2)
