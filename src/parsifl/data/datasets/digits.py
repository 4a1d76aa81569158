"""The digits that ship with scikit-learn: real data without a download."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from parsifl.core.errors import DataError
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
    # importing scikit-learn takes a second, which would delay every message to a client
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the digits ship with scikit-learn, which is not installed")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return Dataset(
        name="digits",
        x=rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8),
        y=rows[:, -1].copy(),
        classes=10,
    )
