"""Tables with a natural client column: states, schools, mine fields, patients."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.dataset import Dataset
from parsifl.data.datasets.hospitals import fill_with_median, read_rows
from parsifl.data.download import Files
from parsifl.data.ragged import Array, Indices
from parsifl.data.registry import About, Remote, dataset

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_CRIME_KEYS = 5  # state, county, community, community name, fold
_CRIME_COLUMNS = 128
_VOICE_FIRST = 6
_PARKINSONS_COLUMNS = 22


@dataset(
    "communities-crime",
    About(
        title="Communities and Crime (UCI), by state",
        size="1,994 communities in 46 states, 100 features (of 122), a number to predict",
        citation="Redmond and Baveja (2002), European Journal of Operational Research 141",
        licence="CC BY 4.0 (UCI)",
        remotes=(
            Remote(
                "communities-crime/communities.data",
                (f"{_UCI}communities/communities.data",),
                "sha256:d90d85bd66bad9a00fa0ed6c15ac017b5966d528e55ba2940ad028d071353f95",
            ),
            Remote(
                "communities-crime/communities.names",
                (f"{_UCI}communities/communities.names",),
                "sha256:80914f24ab37261fb0fbda7e417cad8001335dadda4a8d702c265601ef8434fc",
            ),
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def communities_crime(files: Files) -> Dataset:
    """Predict violent crimes per head; one client per state.

    County, community, name and fold are not features. Columns that are missing for more than half
    of the communities (22 on police) are dropped; the one remaining missing entry is set to its
    column's median.
    """
    path = files.path("communities-crime/communities.data")
    with path.open(newline="") as stream:
        table = [[*row[:3], "?", *row[4:]] for row in csv.reader(stream) if row]
    rows = read_rows((",".join(row) for row in table), _CRIME_COLUMNS, str(path))
    names = _attributes(files.path("communities-crime/communities.names").read_text())
    features = rows[:, _CRIME_KEYS:-1]
    columns = np.flatnonzero(np.isnan(features).mean(axis=0) <= 0.5)
    groups, group_names = _number(rows[:, 0], "state")
    return Dataset(
        "communities-crime",
        fill_with_median(features[:, columns]),
        rows[:, -1],
        groups=groups,
        group_names=group_names,
        feature_names=tuple(names[_CRIME_KEYS + i] for i in columns),
    )


@dataset(
    "parkinsons-telemonitoring",
    About(
        title="Parkinson's telemonitoring (UCI), by patient",
        size="5,875 recordings of 42 patients, 19 features, a score to predict",
        citation="Tsanas, Little, McSharry and Ramig (2009), IEEE Trans. Biomedical Engineering",
        licence="CC BY 4.0 (UCI)",
        remotes=(
            Remote(
                "parkinsons-telemonitoring/parkinsons_updrs.data",
                (f"{_UCI}parkinsons/telemonitoring/parkinsons_updrs.data",),
                "sha256:f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39",
            ),
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def parkinsons(files: Files, *, target: str = "total") -> Dataset:
    """Predict the motor or the total UPDRS score (target=motor, total); one client per patient."""
    targets = {"motor": 4, "total": 5}
    if target not in targets:
        raise ConfigError(f"target must be motor or total, got '{target}'")
    path = files.path("parkinsons-telemonitoring/parkinsons_updrs.data")
    header, *lines = path.read_text().splitlines()
    rows = read_rows(lines, _PARKINSONS_COLUMNS, str(path))
    columns = [1, 2, 3, *range(_VOICE_FIRST, _PARKINSONS_COLUMNS)]
    groups, group_names = _number(rows[:, 0], "patient")
    names = header.split(",")
    return Dataset(
        "parkinsons-telemonitoring",
        rows[:, columns],
        rows[:, targets[target]],
        groups=groups,
        group_names=group_names,
        feature_names=tuple(names[i] for i in columns),
    )


@dataset(
    "school",
    About(
        title="Exam scores of pupils in inner London, by school",
        size="15,362 pupils of 139 schools, 28 features, a score to predict",
        citation="Goldstein (1991); matrix form of Zhou, Chen and Ye (2012), MALSAR",
        remotes=(
            Remote(
                "school/school.mat",
                ("https://raw.githubusercontent.com/jiayuzhou/MALSAR/master/data/school.mat",),
                "sha256:57fb3238fdd03a9aa17276e2ce18d9bbb5d128c3261e794fe6233b58b6909068",
            ),
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def school(files: Files) -> Dataset:
    """Predict the exam score; one client per school."""
    x, y, groups = _tasks(files, "school/school.mat", "X", "Y")
    names = tuple(f"school {number + 1}" for number in range(int(groups.max()) + 1))
    return Dataset("school", x, y.astype(np.float64), groups=groups, group_names=names)


@dataset(
    "landmine",
    About(
        title="Landmine detection from radar features, by field",
        size="14,820 objects in 29 fields, 9 features, 2 classes (904 mines)",
        citation="Xue, Liao, Carin and Krishnapuram (2007), JMLR 8",
        remotes=(
            Remote(
                "landmine/LandmineData.mat",
                (
                    "https://raw.githubusercontent.com/daizhongxiang/"
                    "Federated_Bayesian_Optimization/master/LandmineData.mat",
                ),
                "sha256:2163ab20a80e33a8b65593c48cf283c540599dcb291105e63fa4af2ce24c2bea",
            ),
        ),
        normalize="feature",
        partition="natural-id",
        dtype="float64",
    ),
)
def landmine(files: Files) -> Dataset:
    """Classify mines and clutter; one client per field. The authors' page no longer exists."""
    x, y, groups = _tasks(files, "landmine/LandmineData.mat", "feature", "label")
    names = tuple(f"field {number + 1}" for number in range(int(groups.max()) + 1))
    return Dataset("landmine", x, y.astype(np.int64), classes=2, groups=groups, group_names=names)


def _tasks(files: Files, name: str, x: str, y: str) -> tuple[Array, Array, Indices]:
    """Read a MATLAB file with one cell per task: features, targets and the task of each row."""
    from scipy.io import loadmat

    path = files.path(name)
    try:
        content: dict[str, Any] = loadmat(str(path))
        features, targets = list(content[x].ravel()), list(content[y].ravel())
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path} is not a MATLAB file with the cells {x} and {y}") from error
    groups = np.repeat(np.arange(len(features)), [len(task) for task in features])
    return (
        np.concatenate(features).astype(np.float64),
        np.concatenate([task.ravel() for task in targets]),
        groups.astype(np.int64),
    )


def _number(values: Array, noun: str) -> tuple[Indices, tuple[str, ...]]:
    known, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64), tuple(f"{noun} {value:g}" for value in known)


def _attributes(text: str) -> list[str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("@attribute")]
    return [words[1] for words in lines]
