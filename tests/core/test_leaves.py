from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core import leaves, tree
from parsifl.core.leaves import LowRank, Sparse

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@dataclass(frozen=True)
class Upload:
    layer: Tensor | LowRank | Sparse
    rank: int


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@given(shapes)
def test_dematricize_undoes_matricize(shape: tuple[int, ...]) -> None:
    tensor = _randn(*shape)
    matrix = leaves.matricize(tensor)
    assert tuple(matrix.shape) == leaves.matrix_shape(shape)
    assert torch.equal(leaves.dematricize(matrix, shape), tensor)


def test_a_convolution_becomes_output_height_by_input_width() -> None:
    tensor = _randn(2, 3, 4, 5)
    matrix = leaves.matricize(tensor)
    for o, i, h, w in np.ndindex(2, 3, 4, 5):
        assert matrix[o * 4 + h, i * 5 + w] == tensor[o, i, h, w]


@given(shapes, st.integers(0, 3))
def test_low_rank_stands_for_the_product_of_its_factors(shape: tuple[int, ...], rank: int) -> None:
    rows, columns = leaves.matrix_shape(shape)
    left, right = _randn(rows, rank), _randn(rank, columns)
    dense = LowRank(left, right, shape).dense()
    assert tuple(dense.shape) == shape
    np.testing.assert_allclose(leaves.matricize(dense).numpy(), left.numpy() @ right.numpy())


def test_sparse_stands_for_zeros_and_its_values() -> None:
    dense = Sparse(torch.tensor([1, 5]), torch.tensor([2.0, -1.0]), (2, 3)).dense()
    assert dense.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0]]
    empty = Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0), (2, 2)).dense()
    assert empty.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_densify_reaches_into_dicts_tuples_and_dataclasses() -> None:
    low_rank = LowRank(_randn(4, 1), _randn(1, 4), (4, 4))
    sparse = Sparse(torch.tensor([0]), torch.ones(1), (2,))
    plain = torch.ones(3)
    found = leaves.densify({"a": (low_rank, sparse), "b": Upload(low_rank, 1), "c": plain})
    assert torch.equal(found["a"][0], low_rank.dense())
    assert found["a"][1].tolist() == [1.0, 0.0]
    assert torch.equal(found["b"].layer, low_rank.dense())
    assert found["b"].rank == 1
    assert found["c"] is plain


@pytest.mark.parametrize(("rank", "shorter"), [(1, True), (2, True), (3, False), (5, False)])
def test_factored_keeps_factors_only_where_they_are_shorter(rank: int, shorter: bool) -> None:
    left, right = _randn(6, rank), _randn(rank, 6)  # 12 r against 36
    found = leaves.factored(left, right, (6, 6))
    assert isinstance(found, LowRank) is shorter
    assert torch.equal(leaves.densify(found), left @ right)


@given(st.integers(0, 10**6))
def test_a_sparse_tensor_is_added_as_its_dense_form_would_be(seed: int) -> None:
    draw = np.random.default_rng(seed)
    places = np.flatnonzero(draw.random(12) < 0.4)
    sparse = Sparse(torch.from_numpy(places), torch.from_numpy(draw.random(len(places))), (3, 4))
    first: dict[str, Tensor] = tree.accumulate(None, tree.Scaled(2.0, {"w": sparse}))
    total = tree.accumulate(first, tree.Scaled(0.5, {"w": sparse}))
    assert total["w"] is first["w"]  # in place
    np.testing.assert_allclose(total["w"], 2.5 * sparse.dense())
    before = torch.ones(3, 4, dtype=torch.float64)
    added: Any = tree.add({"w": before}, {"w": sparse})
    assert torch.equal(added["w"], 1 + sparse.dense())
    assert torch.equal(before, torch.ones_like(before))  # `add` leaves its arguments alone
