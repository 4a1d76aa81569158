"""Gene expression: many more features than patients."""

from __future__ import annotations

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.rdata import read_rdata
from parsifl.data.registry import About, Remote, dataset


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
        normalize="none",
        partition="iid",
        dtype="float64",
    ),
)
def golub(files: Files) -> Dataset:
    """Classify AML (1) and ALL (0); expression levels as preprocessed by Dudoit et al. (2002)."""
    path = files.path("golub-leukemia/golub.RData")
    content = read_rdata(path)
    if not {"golub", "golub.cl", "golub.gnames"} <= set(content):
        raise DataError(f"{path} lacks golub, golub.cl or golub.gnames; it has {sorted(content)}")
    return Dataset(
        "golub-leukemia",
        np.ascontiguousarray(content["golub"].T),
        content["golub.cl"].astype(np.int64),
        classes=2,
        feature_names=tuple(str(row[-1]) for row in content["golub.gnames"]),
    )
