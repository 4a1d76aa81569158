"""CSR mini-batches on the columns that occur: the same products, never anything dense."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core.batching import Batches
from parsifl.linear.design import CsrDesign, Entries, compacted


def _batches(x: CsrDesign, index: Tensor) -> Batches:
    weight = torch.ones(index.shape, dtype=torch.float64)
    active = torch.ones(len(index), dtype=torch.bool)
    y = torch.zeros(len(x), dtype=torch.float64)
    return Batches(x, y, index, weight, active, torch.tensor(0))


def test_touched_columns_are_kept_and_those_asked_for() -> None:
    sparse = np.zeros((4, 100))
    sparse[0, 3], sparse[1, 50], sparse[2, 3], sparse[3, 99] = 1.0, 2.0, 3.0, 4.0
    batches = _batches(CsrDesign(sp.csr_matrix(sparse)), torch.tensor([[2, 0], [0, 1]]))
    small = compacted(batches, np.arange(100) == 7)
    assert small.columns.tolist() == [3, 7, 50]
    assert len(small.entries.starts) == 4  # three distinct rows
    assert small.step(1).product(torch.eye(3, dtype=torch.float64)).tolist() == [
        [1.0, 0.0, 0.0],
        [0.0, 0.0, 2.0],
    ]


@given(seed=st.integers(0, 10**6), density=st.sampled_from([0.0, 0.1, 0.7]))
def test_products_are_those_of_the_rows(seed: int, density: float) -> None:
    draw = np.random.default_rng(seed)
    dense = draw.standard_normal((6, 30)) * (draw.random((6, 30)) < density)
    index = draw.integers(0, 6, (3, 4))
    batches = _batches(CsrDesign(sp.csr_matrix(dense)), torch.from_numpy(index))
    small = compacted(batches, np.arange(30) == 29)
    columns = small.columns.numpy()
    touched = dense[index.ravel()].any(0) | (np.arange(30) == 29)
    assert columns.tolist() == np.flatnonzero(touched).tolist()
    vector, matrix = draw.standard_normal(len(columns)), draw.standard_normal((2, len(columns)))
    slope, slopes = draw.standard_normal(4), draw.standard_normal((4, 2))
    for number, chosen in enumerate(index):
        rows, part = small.step(number), dense[np.ix_(chosen, columns)]
        for found, expected in (
            (rows.product(torch.from_numpy(vector)), part @ vector),
            (rows.product(torch.from_numpy(matrix)), part @ matrix.T),
            (rows.adjoint(torch.from_numpy(slope)), part.T @ slope),
            (rows.adjoint(torch.from_numpy(slopes)), slopes.T @ part),
        ):
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_kind_of_index_and_value_is_taken(kind: type, dtype: type) -> None:
    rows = Entries(
        np.array([0, 1, 1, 3], kind), np.array([2, 0, 2], kind), np.array([1, 2, 3], dtype), 3
    )
    vector = torch.from_numpy(np.array([1, 0, 10], dtype))
    for chosen, expected in ([2, 1, 2], [32, 0, 32]), ([1, 0], [0, 10]), ([0, 1, 2], [10, 0, 32]):
        assert rows.view(np.array(chosen)).product(vector).tolist() == expected
        assert (
            rows.rows(np.array(chosen)).view(np.arange(len(chosen))).product(vector).tolist()
            == expected
        )
    nothing = rows.view(np.zeros(0, np.int64))
    assert nothing.product(vector).tolist() == []
    assert nothing.adjoint(vector[:0]).tolist() == [0, 0, 0]


def test_a_csr_design_never_becomes_dense() -> None:
    wide = CsrDesign(sp.csr_matrix(([1.0, 2.0], ([0, 5], [0, 10**7])), shape=(6, 10**7 + 1)))
    small = compacted(_batches(wide, torch.tensor([[0, 5]])), np.zeros(10**7 + 1, np.bool_))
    assert (small.entries.width, len(small.entries.values)) == (2, 2)
    assert small.columns.tolist() == [0, 10**7]


def test_places_and_starts_may_have_different_types() -> None:
    matrix = sp.csr_matrix(np.eye(4))
    matrix.indptr = matrix.indptr.astype(np.int64)
    found = compacted(_batches(CsrDesign(matrix), torch.tensor([[0, 2]])), np.zeros(4, np.bool_))
    assert found.step(0).product(torch.ones(2, dtype=torch.float64)).tolist() == [1.0, 1.0]
