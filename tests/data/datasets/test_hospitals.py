from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.datasets.hospitals import fill_with_median, read_rows
from parsifl.data.registry import load

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


@pytest.fixture
def hearts(home: Path) -> Path:
    (home / "heart-disease").mkdir()
    for number, hospital in enumerate(HOSPITALS):
        whole = ",".join(["1.0"] * 12 + [str(number), str(number)])
        holed = ",".join(["2"] * 3 + ["?"] + ["2"] * 8 + ["?", "0"])
        path = home / f"heart-disease/processed.{hospital}.data"
        path.write_text(f"{whole}\n{holed}\n")
    return home


def test_missing_entries_get_the_median_of_the_observed_ones(hearts: Path) -> None:
    data = load("heart-disease", hearts, verify=False)
    x = np.asarray(data.x)
    assert x.shape == (8, 13)
    assert x[1, 3] == 1.0
    assert x[1, 12] == 1.5  # the median of 0, 1, 2, 3
    assert data.y.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_indicators_mark_what_was_missing(hearts: Path) -> None:
    data = load("heart-disease", hearts, verify=False, missing="indicator")
    assert data.feature_names[13:] == ("trestbps missing", "thal missing")
    assert np.asarray(data.x)[:2, 13:].tolist() == [[0, 0], [1, 1]]


def test_dropping_leaves_whole_patients_and_ten_columns(hearts: Path) -> None:
    data = load("heart-disease", hearts, verify=False, missing="drop")
    assert data.x.shape == (4, 10)
    with pytest.raises(ConfigError, match="missing must be"):
        load("heart-disease", hearts, verify=False, missing="guess")


def test_rows_that_cannot_be_read_are_named() -> None:
    with pytest.raises(DataError, match="row 1 has 3 columns, expected 2"):
        read_rows(["1,2", "1,2,3"], 2, "file")
    with pytest.raises(DataError, match="file: could not convert"):
        read_rows(["1,x"], 2, "file")
    assert fill_with_median(np.array([[1.0], [np.nan], [3.0]])).ravel().tolist() == [1, 2, 3]


def test_the_real_hospitals_have_the_known_counts(real: Path) -> None:
    data = load("heart-disease", real)
    assert data.groups is not None
    assert np.bincount(data.groups).tolist() == [303, 294, 123, 200]
    assert [int(data.y[data.groups == g].sum()) for g in range(4)] == [139, 106, 115, 149]
    assert len(load("heart-disease", real, missing="drop")) == 740  # as FLamby's Fed-Heart-Disease


def test_regions_of_tcga_brca_come_from_the_split_file(home: Path) -> None:
    (home / "fed-tcga-brca").mkdir()
    (home / "fed-tcga-brca/brca.csv").write_text(
        "pid,age,E,T\na,50,1.0,10\nb,60,0.0,20\nc,70,1,5\n"
    )
    split = home / "fed-tcga-brca/train_test_split.csv"
    split.write_text("pid,fold,fold2\nb,train,train_4\na,test,test_1\n")
    data = load("fed-tcga-brca", home, verify=False)
    assert data.y.tolist() == [[20, 0]]
    assert data.groups is not None
    assert data.group_names[int(data.groups[0])] == "Europe"
    assert data.test_y is not None
    assert data.test_y.tolist() == [[10, 1]]
    split.write_text("pid,fold,fold2\n")
    with pytest.raises(DataError, match="expected columns E and T"):
        load("fed-tcga-brca", home, verify=False)


def test_the_real_regions_have_the_published_counts(real: Path) -> None:
    data = load("fed-tcga-brca", real)
    assert data.groups is not None
    assert np.bincount(data.groups).tolist() == [248, 156, 164, 129, 129, 40]
    assert data.x.shape == (866, 39)
    assert len(data.merged()) == 1088
