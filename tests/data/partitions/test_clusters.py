from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.dataset import Dataset
from parsifl.data.partitions import kmeans

TRUE = np.repeat(np.arange(4), 50)
X = np.eye(4)[TRUE] * 10 + np.random.default_rng(0).normal(0, 0.1, (200, 4))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_client_holds_one_part_of_each_of_two_clusters(sparse: bool) -> None:
    dataset = Dataset("d", csr_matrix(X) if sparse else X, np.zeros(200))
    parts = kmeans(dataset, 30, Key(0), clusters=4, parts=5)
    assert parts.sizes.tolist() == [20] * 30
    assert all(len(set(TRUE[part])) == 2 for part in parts)
    assert all(np.bincount(TRUE[part]).max() == 10 for part in parts)


def test_labels_can_stand_for_clusters() -> None:
    dataset = Dataset("d", X, TRUE, classes=4)
    parts = kmeans(dataset, 9, Key(0), parts=10, picks=3, by="labels")
    assert all(len(set(TRUE[part])) == 3 for part in parts)


def test_a_cluster_smaller_than_the_number_of_parts_gives_no_empty_part() -> None:
    dataset = Dataset("d", X, TRUE, classes=4)
    assert kmeans(dataset, 50, Key(0), parts=500, by="labels").sizes.tolist() == [2] * 50


def test_impossible_demands_are_refused() -> None:
    dataset = Dataset("d", X, np.zeros(200))
    with pytest.raises(ConfigError, match="picks must be 1 to 4"):
        kmeans(dataset, 3, Key(0), clusters=4, picks=5)
    with pytest.raises(ConfigError, match="by must be"):
        kmeans(dataset, 3, Key(0), by="colour")
    with pytest.raises(ConfigError, match="clusters must be 1 to 200"):
        kmeans(dataset, 3, Key(0), clusters=300)
    with pytest.raises(DataError, match="no labels"):
        kmeans(dataset, 3, Key(0), by="labels")
