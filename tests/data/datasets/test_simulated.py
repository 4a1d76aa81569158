from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import ConfigError
from parsifl.data.registry import load


def test_synthetic_sizes_and_labels_follow_the_generator() -> None:
    data = load("synthetic", clients=30)
    assert data.shape == (60,)
    assert data.groups is not None
    sizes = np.bincount(data.groups)
    assert all(sizes % 5 == 0)
    assert sizes.min() >= 250
    assert data.classes == 10
    # within a client the variance of coordinate j is j^-1.2
    biggest = np.asarray(data.x)[data.groups == int(np.argmax(sizes))]
    assert np.allclose(biggest.var(axis=0)[:5], np.arange(1, 6) ** -1.2, rtol=0.2)


def test_synthetic_is_one_linear_model_a_client() -> None:
    data = load("synthetic", clients=1)
    x = np.column_stack([np.asarray(data.x), np.ones(len(data))])
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1e4, max_iter=500).fit(x, data.y)
    assert model.score(x, data.y) > 0.97


def test_a_clients_rows_do_not_depend_on_how_many_clients_there_are() -> None:
    few, many = load("synthetic", clients=2), load("synthetic", clients=5)
    first = np.asarray(few.x)
    assert np.array_equal(first, np.asarray(many.x)[: len(few)])
    assert not np.array_equal(np.asarray(load("synthetic", clients=2, seed=1).x)[0], first[0])


def test_fedht_regression_is_linear_with_noise_of_mean_u() -> None:
    data = load("fedht-regression", clients=3, samples=4000)
    truth = data.truth
    assert truth is not None
    assert np.count_nonzero(truth, axis=1).tolist() == [100] * 3
    assert np.count_nonzero(truth[:, 100:]) == 0
    for client in range(3):
        rows = data.groups == client
        noise = data.y[rows] - np.asarray(data.x)[rows] @ truth[client]
        assert abs(noise.std() - 1) < 0.05
        # the coefficients and the noise share the mean u_i
        assert abs(noise.mean() - truth[client, :100].mean()) < 4 * math.sqrt(1 / 100 + 1 / 4000)
    assert np.allclose(np.asarray(data.x)[rows].var(axis=0)[:5], np.arange(1, 6) ** -1.2, rtol=0.2)


def test_fedht_classification_labels_the_top_tenth_of_each_client() -> None:
    data = load("fedht-classification", clients=4, samples=100)
    labels = data.y.reshape(4, 100)
    assert labels.sum(axis=1).tolist() == [10] * 4
    assert data.x.dtype == np.float32
    assert data.truth is not None
    score = np.asarray(data.x[:100], dtype=np.float64) @ data.truth[0]
    assert score[labels[0] == 1].mean() > score[labels[0] == 0].max() - 3


def test_reading_spread_as_variance_takes_the_root() -> None:
    wide = load("fedht-regression", clients=1, samples=1, alpha=4.0, beta=0.0, spread="variance")
    same = load("fedht-regression", clients=1, samples=1, alpha=2.0, beta=0.0)
    assert np.array_equal(np.asarray(wide.x), np.asarray(same.x))
    with pytest.raises(ConfigError, match="std or variance"):
        load("fedht-regression", spread="range")


def test_fedgradmp_measures_one_sparse_unit_vector() -> None:
    data = load("fedgradmp", clients=4, samples=500, dimension=40, sparsity=5, alpha=0.25)
    assert data.truth is not None
    assert np.count_nonzero(data.truth) == 5
    assert np.isclose(np.linalg.norm(data.truth), 1)
    assert np.allclose(data.y, np.asarray(data.x) @ data.truth)
    variances = [np.asarray(data.x)[data.groups == i].var() for i in range(4)]
    assert np.allclose(variances, np.arange(1, 5) ** -1.1, rtol=0.05)


def test_fedgradmp_noise_is_a_variance() -> None:
    quiet = load("fedgradmp", clients=10, samples=200, dimension=20)
    noisy = load("fedgradmp", clients=10, samples=200, dimension=20, noise=0.04)
    assert np.isclose((noisy.y - quiet.y).std(), 0.2, rtol=0.1)


@pytest.mark.parametrize("options", [{"clients": 0}, {"sparsity": 30, "dimension": 20}])
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|exceeds"):
        load("fedgradmp", **options)


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


def test_impossible_sizes_of_text_are_rejected() -> None:
    with pytest.raises(ConfigError, match="fit the size"):
        load("text-like", rows=5, topics=6)
