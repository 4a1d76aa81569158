"""Gene expression: many more features than patients."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.registry import About, Remote, dataset

_NEEDS = "rdata, to read R's files: pip install 'parsifl[rdata]'"


@dataset(
    "golub-leukemia",
    About(
        title="Leukemia gene expression (Golub et al., as in Bioconductor's multtest)",
        size="38 patients (27 ALL, 11 AML), 3,051 genes, 2 classes",
        citation="Golub et al. (1999), Molecular classification of cancer ..., Science 286",
        licence="LGPL (multtest)",
        remotes=(
            Remote(
                "golub-leukemia/golub.RData",
                ("https://raw.githubusercontent.com/cran/multtest/master/data/golub.RData",),
                "sha256:c49407449272725e6e02ef5f609115ee1f6854e8b19d7f477625af012a8e3e47",
            ),
        ),
        needs=_NEEDS,
        normalize="none",
        partition="iid",
        dtype="float64",
    ),
)
def golub(files: Files) -> Dataset:
    """Classify AML (1) and ALL (0); expression levels as preprocessed by Dudoit et al. (2002)."""
    path = files.path("golub-leukemia/golub.RData")
    content = _read(path)
    if not {"golub", "golub.cl", "golub.gnames"} <= set(content):
        raise DataError(f"{path} lacks golub, golub.cl or golub.gnames; it has {sorted(content)}")
    x = np.ascontiguousarray(np.asarray(content["golub"]).T)
    names = np.asarray(content["golub.gnames"]).reshape(x.shape[1], -1, order="F")
    return Dataset(
        "golub-leukemia",
        x,
        np.asarray(content["golub.cl"]).astype(np.int64),
        classes=2,
        feature_names=tuple(str(name) for name in names[:, -1]),
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the variables of an .RData file."""
    try:
        rdata: Any = importlib.import_module("rdata")
    except ImportError as error:
        raise DataError(f"'golub-leukemia' needs {_NEEDS}") from error
    try:
        return dict(rdata.read_rda(path, default_encoding="utf8"))
    except Exception as error:  # a damaged file may make the reader raise any exception
        raise DataError(f"{path} is not an RData file that can be read: {error}") from error
