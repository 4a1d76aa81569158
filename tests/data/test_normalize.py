from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import ConfigError, DataError
from parsifl.data import normalize as module
from parsifl.data.normalize import normalizations, normalize
from parsifl.data.ragged import Array


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Array:
    monkeypatch.setattr(module, "_CHUNK", 7)  # several chunks, the last one shorter
    return np.random.default_rng(0).integers(0, 256, (30, 3, 4, 4), dtype=np.uint8)


def test_pixel_is_pfedmes_formula(images: Array) -> None:
    rows = np.arange(20)
    mean, std = images[:20].mean(axis=0), images[:20].std(axis=0)
    got = np.asarray(normalize("pixel", images, rows))
    assert np.allclose(got, (images - mean) / (std + 0.001), atol=1e-5)
    assert got.dtype == np.float32


def test_channel_has_mean_zero_and_deviation_one_on_the_given_rows(
    images: Array,
) -> None:
    got = np.asarray(normalize("channel", images, np.arange(20)))
    assert np.allclose(got[:20].mean(axis=(0, 2, 3)), 0, atol=1e-5)
    assert np.allclose(got[:20].std(axis=(0, 2, 3)), 1, atol=1e-5)
    assert not np.allclose(got.mean(axis=(0, 2, 3)), 0, atol=1e-5)


def test_feature_turns_a_constant_column_into_zero_and_keeps_float64() -> None:
    got = normalize("feature", np.array([[1.0, 5.0], [3.0, 5.0]]), np.arange(2))
    assert np.asarray(got).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert got.dtype == np.float64


@pytest.mark.parametrize("name", ["pixel", "feature"])
@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_what_is_constant_in_training_rows_is_zero_everywhere(name: str, kind: type) -> None:
    x: Array = np.array([[1, 0], [3, 0], [2, 255]], dtype=kind)
    got = np.asarray(normalize(name, x, np.arange(2)))
    assert got[:, 1].tolist() == [0, 0, 0]
    assert got[2, 0] == 0


def test_unit_divides_by_the_largest_value_sparse_or_dense() -> None:
    x = np.array([[0.0, -4.0], [2.0, 0.0]])
    assert np.asarray(normalize("unit", x, np.arange(2))).tolist() == [[0, -1], [0.5, 0]]
    sparse = normalize("unit", csr_matrix(x), np.arange(2))
    assert isinstance(sparse, csr_matrix)
    assert sparse.toarray().tolist() == [[0, -1], [0.5, 0]]
    assert x.tolist() == [[0, -4], [2, 0]]


def test_none_returns_the_same_object() -> None:
    x = np.ones((2, 2))
    assert normalize("none", x, np.arange(2)) is x


def test_what_cannot_work_is_refused() -> None:
    assert "pixel" in normalizations()
    with pytest.raises(ConfigError, match="did you mean 'pixel'"):
        normalize("pixl", np.ones((2, 2)), np.arange(2))
    with pytest.raises(DataError, match="sparse"):
        normalize("feature", csr_matrix(np.ones((2, 2))), np.arange(2))
    with pytest.raises(DataError, match="needs images"):
        normalize("channel", np.ones((2, 2)), np.arange(2))
