from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from parsifl.core.errors import DataError
from parsifl.data.clients import pool

X, Y = np.ones((3, 2)), np.array([0, 1, 1])
GOOD = (X, Y)
HOLE = np.where(np.arange(6).reshape(3, 2) == 3, np.nan, 1.0)


def test_clients_of_different_kinds_of_container_are_pooled() -> None:
    pooled = pool([GOOD, (torch.zeros(1, 2, dtype=torch.float64), [1]), (X.tolist(), Y > 0)])
    assert pooled.x.shape == (7, 2)
    assert pooled.y.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert pooled.sizes.tolist() == [3, 1, 3]
    assert pooled.classes == 2


def test_the_labels_of_a_classifier_may_be_minus_and_plus_one() -> None:
    pooled = pool([(X, np.array([-1, 1, 1])), (X, np.array([-1, -1, -1])), (X, np.ones(3, int))])
    assert pooled.y.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert pooled.classes == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((HOLE, Y), "client 1: X holds NaN"),
        ((csr_matrix(X), Y), "client 1: X must be sparse for all clients or for none"),
        ((X, np.array([0.0, 1.0, 1.0])), "client 1: y is float64 but client 0 has int64"),
        ((X.astype(np.int64), Y), "client 1: X is int64"),
        ((np.ones((3, 4)), Y), r"client 1: rows of X have shape \(4,\)"),
        ((X, Y[:2]), "client 1: X has 3 rows but y has 2"),
        ((X[:0], Y[:0]), "client 1 has no rows"),
        ((X, np.array([0, -1, 1])), r"labels from 0, or -1 and \+1, got -1"),
        ((np.ones(3), Y), "client 1: X must have rows and columns"),
        ((X, np.int64(3)), "client 1: y must be a dense array"),
        ((np.array([["a"]]), np.array([0])), "client 1: X must hold numbers"),
        (X, r"client 1: expected a pair \(X, y\)"),
    ],
)
def test_the_client_whose_data_do_not_fit_is_named(bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pool([GOOD, bad, GOOD])


def test_a_hole_in_a_sparse_matrix_or_in_a_target_is_found() -> None:
    sparse = csr_matrix(X)
    with pytest.raises(DataError, match="client 2: X holds NaN"):
        pool([(sparse, Y), (csr_matrix((3, 2)), Y), (csr_matrix(HOLE), Y)])
    with pytest.raises(DataError, match="client 1: y holds NaN"):
        pool([(X, Y.astype(float)), (X, np.array([0, np.inf, 1]))])


def test_values_whose_sum_is_not_finite_are_taken_and_those_that_cancel_are_not() -> None:
    large = np.full((3, 2), 3e38, dtype=np.float32)
    assert np.array_equal(pool([(large, Y), (large, Y)]).x, np.concatenate([large, large]))
    both = np.where(np.arange(6).reshape(3, 2) < 3, np.inf, -np.inf)
    with pytest.raises(DataError, match="client 1: X holds NaN"):
        pool([GOOD, (both, Y)])


def test_no_clients_and_labels_with_two_axes_are_refused() -> None:
    with pytest.raises(DataError, match="no clients"):
        pool([])
    with pytest.raises(DataError, match=r"one per row.*y.argmax\(1\)"):
        pool([(X, np.zeros((3, 2), dtype=np.int64))])


@pytest.mark.parametrize(
    ("client", "text"),
    [
        (([X, np.ones((len(X), 7))], Y), r"client 0: X must be one array, got 2 parts.*np.hstack"),
        (((X, X), Y), r"client 0: X has 2 rows but y has \d+: a model reads one input"),
        (({"a": X, "b": X}, Y), "client 0: X must be one array, got a mapping: a model reads one"),
        ((X, X, Y), r"client 0: expected a pair \(X, y\), got 3 items: a model reads one input"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "X must be one array, got 2 parts of unequal lengths"),
        ((X, [[0], [0, 1]]), "y must be one array, got 2 parts of unequal lengths"),
    ],
)
def test_several_inputs_and_ragged_lists_are_explained(client: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        pool([client])
