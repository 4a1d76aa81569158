from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from parsifl.core.errors import DataError
from parsifl.data.datasets.text import read_wabbit
from parsifl.data.registry import load

LIBSVM = "-1 1:0.5 47236:2\n1 3:1.5\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bz2.compress(text.encode()) if path.suffix == ".bz2" else text.encode())


def test_rcv1_is_read_compressed_or_plain_and_labels_become_classes(home: Path) -> None:
    write(home / "rcv1/rcv1_train.binary.bz2", LIBSVM)
    write(home / "rcv1/rcv1_test.binary", LIBSVM)
    data = load("rcv1", home)
    assert data.x.shape == (2, 47236)
    assert isinstance(data.x, csr_matrix)
    assert data.x[0, 0] == 0.5
    assert data.x[0, 47235] == 2
    assert data.y.tolist() == [0, 1]
    assert data.test_x is None
    assert load("rcv1", home, test=True).test_y is not None


def test_e2006_has_a_numeric_target(home: Path) -> None:
    write(home / "e2006-tfidf/E2006.train.bz2", "-3.5 1:1 150358:2\n")
    write(home / "e2006-tfidf/E2006.test.bz2", "-4.25 2:1\n")
    data = load("e2006-tfidf", home)
    assert data.x.shape == (1, 150_360)
    assert data.classes is None
    assert data.y.tolist() == [-3.5]
    assert data.test_y is not None
    assert data.test_y.tolist() == [-4.25]


@pytest.mark.parametrize("text", ["-1 1:0.5 47237:2\n", "one 1:2\n"])
def test_a_libsvm_file_that_does_not_fit_is_named(home: Path, text: str) -> None:
    write(home / "rcv1/rcv1_train.binary", text)
    with pytest.raises(DataError, match="not a LIBSVM file of 47236 columns"):
        load("rcv1", home)


def test_a_users_own_file_is_classes_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    write(path, "5 1:1\n2 2:1\n5 1:2\n")
    data = load("libsvm", path=str(path))
    assert (data.classes, data.y.tolist(), data.x.shape) == (2, [1, 0, 1], (3, 2))
    assert load("libsvm", path=str(path), task="regression").y.tolist() == [5, 2, 5]
    assert load("libsvm", path=str(path), columns=9).x.shape == (3, 9)
    with pytest.raises(DataError, match="file not found"):
        load("libsvm", path=str(tmp_path / "none"))


def test_wabbit_lines_with_and_without_a_namespace_add_repeated_features() -> None:
    x, y = read_wabbit(["1 |f 2:1 2:3\n", "\n", "-1 | 0:2 1\n"], columns=3)
    assert x.toarray().tolist() == [[0, 0, 4], [2, 1, 0]]
    assert y.tolist() == [1, -1]


@pytest.mark.parametrize("line", ["|f 1:2", "x |f 1:2", "1 |f a:2", "1 |f 1:b"])
def test_wabbit_lines_that_cannot_be_read_are_numbered(line: str) -> None:
    with pytest.raises(DataError, match="line 2 is not in Vowpal"):
        read_wabbit(["1 |f 1:2", line], columns=3)


def test_wabbit_features_beyond_the_columns_are_refused() -> None:
    with pytest.raises(DataError, match="0 to 2; got 3"):
        read_wabbit(["1 |f 3:1"], columns=3)


def test_the_real_sample_has_the_known_counts(real: Path) -> None:
    data = load("rcv1-sample", real)
    assert data.x.shape == (1000, 47236)
    assert data.test_x is not None
    assert data.test_x.shape == (500, 47236)
    assert isinstance(data.x, csr_matrix)
    assert len(np.unique(data.x.indices)) == 9738
    assert np.bincount(data.y).tolist() == [541, 459]
