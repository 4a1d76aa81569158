from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.registry import load


def test_communities_drop_empty_columns_and_keys(home: Path) -> None:
    (home / "communities-crime").mkdir()
    names = "\n".join(f"@attribute a{i} numeric" for i in range(128))
    (home / "communities-crime/communities.names").write_text(names)
    rows = []
    for state in (8, 53, 8):
        features = ["0.5"] * 120 + ["?", "?" if state == 53 else "0.25"]
        rows.append(
            ",".join([str(state), "?", "?", "Some,where".replace(",", ""), "1", *features, "0.9"])
        )
    (home / "communities-crime/communities.data").write_text("\n".join(rows))
    data = load("communities-crime", home, verify=False)
    assert data.x.shape == (3, 121)
    assert np.asarray(data.x)[1, 120] == 0.25
    assert data.feature_names[-1] == "a126"
    assert data.group_names == ("state 8", "state 53")
    assert data.y.tolist() == [0.9] * 3


def test_parkinsons_targets_are_no_features(home: Path) -> None:
    (home / "parkinsons-telemonitoring").mkdir()
    lines = [",".join(f"c{i}" for i in range(22)), ",".join(str(i) for i in range(1, 23))]
    path = home / "parkinsons-telemonitoring/parkinsons_updrs.data"
    path.write_text("\n".join(lines))
    total, motor = (
        load("parkinsons-telemonitoring", home, verify=False, target=t) for t in ("total", "motor")
    )
    assert (total.y.tolist(), motor.y.tolist()) == ([6], [5])
    assert np.asarray(total.x)[0].tolist() == [2, 3, 4, *range(7, 23)]
    with pytest.raises(ConfigError, match="motor or total"):
        load("parkinsons-telemonitoring", home, verify=False, target="both")


def test_cells_of_a_matlab_file_are_tasks(home: Path) -> None:
    for name, x, y in (("landmine/LandmineData", "feature", "label"), ("school/school", "X", "Y")):
        (home / name).parent.mkdir()
        cells, targets = np.empty((1, 2), dtype=object), np.empty((1, 2), dtype=object)
        cells[0, :] = [np.ones((2, 3)), np.zeros((1, 3))]
        targets[0, :] = [np.array([[1], [0]], dtype=np.uint8), np.array([[1]], dtype=np.uint8)]
        savemat(home / f"{name}.mat", {x: cells, y: targets})
    mines, school = (load(name, home, verify=False) for name in ("landmine", "school"))
    assert mines.classes == 2
    assert school.classes is None
    for data in (mines, school):
        assert data.groups is not None
        assert data.groups.tolist() == [0, 0, 1]
        assert data.y.tolist() == [1, 0, 1]
        assert data.x.shape == (3, 3)


def test_a_file_that_is_not_matlabs_is_named(home: Path) -> None:
    (home / "school").mkdir()
    (home / "school/school.mat").write_bytes(b"no matrix" * 100)
    with pytest.raises(DataError, match="not a MATLAB file with the cells X and Y"):
        load("school", home, verify=False)


@pytest.mark.parametrize(
    ("name", "shape", "groups"),
    [
        ("communities-crime", (1994, 100), 46),
        ("parkinsons-telemonitoring", (5875, 19), 42),
        ("school", (15362, 28), 139),
        ("landmine", (14820, 9), 29),
    ],
)
def test_the_real_tables_have_the_known_counts(
    real: Path, name: str, shape: tuple[int, int], groups: int
) -> None:
    data = load(name, real)
    assert data.x.shape == shape
    assert data.groups is not None
    assert len(np.unique(data.groups)) == len(data.group_names) == groups
    if name == "landmine":
        assert data.y.sum() == 904
