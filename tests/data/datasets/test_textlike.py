from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import ConfigError
from parsifl.data.registry import load


def test_text_like_data_are_as_wide_as_rcv1_and_as_sparse() -> None:
    data = load("text-like", rows=1000)
    assert isinstance(data.x, csr_matrix)
    assert data.x.shape == (1000, 47236)
    assert 50 < data.x.nnz / 1000 < 110
    assert np.allclose(data.x.multiply(data.x).sum(axis=1), 1)
    assert np.bincount(data.y).tolist() == [500, 500]
    assert data.truth is not None
    assert np.count_nonzero(data.truth) == 200
    assert data.groups is not None
    assert len(np.unique(data.groups)) == 10


def test_the_stand_in_for_e2006_has_its_size_and_a_predictable_target() -> None:
    data = load("text-like-e2006", rows=500)
    assert data.x.shape == (500, 150_360)
    assert data.truth is not None
    scores = data.x @ data.truth
    assert np.corrcoef(scores, data.y)[0, 1] > 0.98


def test_words_are_zipf_and_topics_differ() -> None:
    data = load("text-like", rows=3000, columns=5000, topics=2)
    assert isinstance(data.x, csr_matrix)
    counts = np.sort(np.bincount(data.x.indices, minlength=5000))[::-1]
    assert counts[0] > 20 * counts[500]
    profiles = [np.asarray(data.x[data.groups == t].mean(axis=0)).ravel() for t in range(2)]
    assert np.corrcoef(profiles[0], profiles[1])[0, 1] < 0.9


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fit the size"):
        load("text-like", rows=5, topics=6)
