"""Medical data with natural sites: heart disease by hospital, breast cancer by region."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array
from parsifl.data.registry import About, Remote, dataset

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_HOSPITALS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_HEART: tuple[str, ...] = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
_MOSTLY_MISSING = ("slope", "ca", "thal")
_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"


def read_rows(lines: Iterable[str], columns: int, source: str) -> Array:
    """Read comma-separated numbers as float64; `?` (missing) becomes NaN."""
    rows = [row for row in csv.reader(lines) if row]
    wrong = next((i for i, row in enumerate(rows) if len(row) != columns), None)
    if wrong is not None:
        raise DataError(f"{source}: row {wrong} has {len(rows[wrong])} columns, expected {columns}")
    try:
        cells = [[np.nan if cell.strip() == "?" else float(cell) for cell in row] for row in rows]
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error
    return np.asarray(cells, dtype=np.float64).reshape(-1, columns)


def fill_with_median(x: Array) -> Array:
    """Return x with each missing entry replaced by the median of its column."""
    return np.where(np.isnan(x), np.nanmedian(x, axis=0), x)


@dataset(
    "heart-disease",
    About(
        title="Heart disease in four hospitals (UCI)",
        size="303 / 294 / 123 / 200 patients, 13 features, 2 classes",
        citation="Janosi, Steinbrunn, Pfisterer and Detrano (1988), UCI repository",
        licence="CC BY 4.0 (UCI)",
        remotes=tuple(
            Remote(
                f"heart-disease/processed.{hospital}.data",
                (f"{_UCI}processed.{hospital}.data",),
                f"sha256:{digest}",
            )
            for hospital, digest in _HOSPITALS.items()
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def heart_disease(files: Files, *, missing: str = "median") -> Dataset:
    """Predict any heart disease (target > 0); one client per hospital.

    Missing entries (`?`): missing=median uses the column's median over all hospitals;
    missing=indicator also adds one 0/1 column for each column with missing entries;
    missing=drop drops slope, ca and thal (mostly missing outside Cleveland) and then every
    patient with a missing entry.
    """
    names = [f"heart-disease/processed.{hospital}.data" for hospital in _HOSPITALS]
    tables = [_read_file(files.path(name), len(_HEART) + 1) for name in names]
    groups = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate(tables)
    x, y, features = rows[:, :-1], (rows[:, -1] > 0).astype(np.int64), _HEART
    if missing == "drop":
        columns = [i for i, name in enumerate(_HEART) if name not in _MOSTLY_MISSING]
        x, features = x[:, columns], tuple(_HEART[i] for i in columns)
        is_complete = ~np.isnan(x).any(axis=1)
        x, y, groups = x[is_complete], y[is_complete], groups[is_complete]
    elif missing in ("median", "indicator"):
        holes = np.isnan(x)
        x = fill_with_median(x)
        if missing == "indicator":
            gaps = np.flatnonzero(holes.any(axis=0))
            x = np.concatenate([x, holes[:, gaps].astype(np.float64)], axis=1)
            features = (*_HEART, *(f"{_HEART[i]} missing" for i in gaps))
    else:
        raise ConfigError(f"missing must be median, indicator or drop, got '{missing}'")
    return Dataset(
        "heart-disease",
        x,
        y,
        classes=2,
        groups=groups.astype(np.int64),
        group_names=tuple(_HOSPITALS),
        feature_names=features,
    )


def _read_file(path: Path, columns: int) -> Array:
    return read_rows(path.read_text().splitlines(), columns, str(path))


@dataset(
    "fed-tcga-brca",
    About(
        title="TCGA-BRCA: survival with breast cancer, six regions (FLamby)",
        size="866 + 222 patients, 39 features, time and event",
        citation="Ogier du Terrail et al. (2022), FLamby, NeurIPS; The Cancer Genome Atlas",
        licence="MIT (FLamby's tables)",
        remotes=(
            Remote(
                "fed-tcga-brca/brca.csv",
                (f"{_FLAMBY}brca.csv",),
                "sha256:07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
            ),
            Remote(
                "fed-tcga-brca/train_test_split.csv",
                (f"{_FLAMBY}train_test_split.csv",),
                "sha256:1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
            ),
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def tcga_brca(files: Files) -> Dataset:
    """Predict survival: y has two columns, days and event (1 = death, 0 = censored)."""
    with files.path("fed-tcga-brca/brca.csv").open(newline="") as stream:
        header, *patients = csv.reader(stream)
    table = {row[0]: row[1:] for row in patients if row}
    with files.path("fed-tcga-brca/train_test_split.csv").open(newline="") as stream:
        splits = [row for row in csv.DictReader(stream) if row["pid"] in table]
    if not splits or header[-2:] != ["E", "T"]:
        raise DataError("'fed-tcga-brca': expected columns E and T last, and the patients' split")
    rows = np.array([table[row["pid"]] for row in splits], dtype=np.float64)
    groups = np.array([int(row["fold2"].rsplit("_", 1)[1]) for row in splits], dtype=np.int64)
    test = np.array([row["fold"] == "test" for row in splits])
    x, y = rows[:, :-2], rows[:, [-1, -2]]
    return Dataset(
        "fed-tcga-brca",
        x[~test],
        y[~test],
        groups=groups[~test],
        group_names=_REGIONS,
        test_x=x[test],
        test_y=y[test],
        test_groups=groups[test],
        feature_names=tuple(header[1:-2]),
    )
