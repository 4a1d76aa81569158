"""The digits that ship with scikit-learn: real data with no download."""

from __future__ import annotations

import numpy as np

from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.registry import About, dataset


@dataset(
    "digits",
    About(
        title="Optical recognition of handwritten digits",
        size="1,797 images of 8 x 8, 10 classes",
        citation="Alpaydin and Kaynak (1998), UCI Machine Learning Repository",
        licence="CC BY 4.0 (UCI); ships with scikit-learn",
        normalize="unit",
    ),
)
def digits(_files: Files) -> Dataset:
    """Gray levels 0 to 16; no official test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Dataset(
        name="digits",
        x=bunch.images.astype(np.uint8)[:, None],
        y=bunch.target.astype(np.int64),
        classes=10,
    )
