from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset

X = np.arange(6.0).reshape(3, 2)
Y = np.array([0, 1, 1])


def test_merging_appends_the_official_test_rows_with_their_groups() -> None:
    data = Dataset(
        "d", X, Y, 2, np.array([0, 1, 1]), test_x=X[:1], test_y=Y[:1], test_groups=np.array([2])
    )
    merged = data.merged()
    assert len(merged) == 4
    assert merged.groups is not None
    assert merged.groups.tolist() == [0, 1, 1, 2]
    assert merged.test_x is None
    assert merged.shape == (2,)


def test_merging_sparse_rows_keeps_them_sparse() -> None:
    merged = Dataset("d", csr_matrix(X), Y, 2, test_x=csr_matrix(X[:1]), test_y=Y[:1]).merged()
    assert isinstance(merged.x, csr_matrix)
    assert np.array_equal(merged.x.toarray(), np.concatenate([X, X[:1]]))


def test_merging_without_a_test_split_changes_nothing() -> None:
    data = Dataset("d", X, Y, 2)
    assert data.merged() is data


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"y": Y[:2]}, "3 rows but y has 2"),
        ({"groups": np.array([0])}, "groups has 1"),
        ({"x": np.where(X == 3, np.nan, X)}, "x contains NaN"),
        ({"x": csr_matrix(np.where(X == 3, np.inf, X))}, "x contains NaN"),
        ({"y": np.array([0.0, np.inf, 1.0]), "classes": None}, "y contains NaN"),
        ({"y": np.array([0, 1, 2])}, "labels must be 0 to 1; got 0 to 2"),
        ({"y": np.array([0.0, 1.0, 1.0])}, "flat array of integers"),
        ({"groups": np.array([0, 1, 2]), "group_names": ("a", "b")}, "groups of 'd'"),
        ({"test_x": X}, "both test_x and test_y"),
        ({"test_x": X[:, :1], "test_y": Y}, r"shape \(1,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset(**{"name": "d", "x": X, "y": Y, "classes": 2, **fields})
