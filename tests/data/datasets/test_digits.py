from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from parsifl.data.registry import load


def test_digits_are_small_gray_images_of_ten_classes() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.uint8
    assert np.asarray(data.x).max() == 16
    assert sorted(set(data.y)) == list(range(10))


def test_digits_are_those_of_scikit_learn() -> None:
    data, theirs = load("digits"), load_digits()
    assert np.array_equal(np.asarray(data.x)[:, 0], theirs.images)
    assert np.array_equal(data.y, theirs.target)
