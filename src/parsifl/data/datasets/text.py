"""Sparse text: LIBSVM files (RCV1, E2006-tfidf), and a sample of RCV1 in Vowpal Wabbit's format."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array
from parsifl.data.registry import About, Remote, dataset

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

RCV1_COLUMNS = 47_236
E2006_COLUMNS = 150_360
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/"
_WABBIT = "https://raw.githubusercontent.com/VowpalWabbit/vowpal_wabbit/master/test/"
_RCV1 = "Lewis, Yang, Rose and Li (2004), RCV1: a new benchmark collection ..., JMLR 5"


def read_libsvm(path: Path, columns: int) -> tuple[csr_matrix, Array]:
    """Read `target index:value ...` lines (plain, .gz or .bz2; indices from 1) as CSR."""
    from sklearn.datasets import load_svmlight_file

    try:
        x, y = load_svmlight_file(
            str(path), n_features=columns or None, zero_based=False, dtype=np.float64
        )
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a LIBSVM file of {columns} columns: {error}") from error
    return x, y


def read_wabbit(lines: Iterable[str], columns: int) -> tuple[csr_matrix, Array]:
    """Read `target |namespace index:value ...` lines as CSR (indices from 0).

    >>> x, y = read_wabbit(["1 |f 0:0.5 3:2", "-1 |f 1"], columns=4)
    >>> x.toarray().tolist(), y.tolist()
    ([[0.5, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], [1.0, -1.0])
    """
    from scipy.sparse import csr_matrix

    targets: list[float] = []
    indices: list[int] = []
    values: list[float] = []
    ends = [0]
    for number, line in enumerate(filter(str.strip, lines), start=1):
        label, _, rest = line.partition("|")
        try:
            targets.append(float(label.split()[0]))
            words = rest.split()
            for pair in words if rest[:1].isspace() else words[1:]:  # a namespace comes first
                index, _, value = pair.partition(":")
                indices.append(int(index))
                values.append(float(value or 1))
        except (ValueError, IndexError) as error:
            raise DataError(f"line {number} is not in Vowpal Wabbit's format: {error}") from error
        ends.append(len(indices))
    if indices and not (min(indices) >= 0 and max(indices) < columns):
        raise DataError(f"feature ids must be 0 to {columns - 1}; got {max(indices)}")
    x = csr_matrix((values, indices, ends), shape=(len(targets), columns))
    x.sum_duplicates()
    return x, np.asarray(targets)


def open_text(path: Path) -> list[str]:
    """Yield the lines of a text file, plain or compressed."""
    opener = {".bz2": bz2.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "rt") as stream:
        return list(stream)


def _binary(y: Array) -> Array:
    """Return -1 / +1 as 0 / 1."""
    return (y > 0).astype(np.int64)


def _remote(folder: str, kind: str, name: str) -> Remote:
    # LIBSVM's page publishes no checksums; sizes and counts are checked by the reader
    return Remote(f"{folder}/{name}", (f"{_LIBSVM}{kind}/{name}",))


@dataset(
    "rcv1",
    About(
        title="Reuters news, economics against the rest (RCV1 binary, LIBSVM)",
        size="20,242 + 677,399 documents, 47,236 features (CSR), 2 classes",
        citation=_RCV1,
        remotes=(
            _remote("rcv1", "binary", "rcv1_train.binary.bz2"),
            _remote("rcv1", "binary", "rcv1_test.binary.bz2"),
        ),
        partition="kmeans",
        dtype="float64",
    ),
)
def rcv1(files: Files, *, test: bool = False) -> Dataset:
    """Cosine-normalised log tf-idf; labels -1 / +1 become 0 / 1; `test` adds the test split."""
    train = _libsvm_path(files, "rcv1/rcv1_train.binary")
    x, y = read_libsvm(train, RCV1_COLUMNS)
    if not test:
        return Dataset("rcv1", x, _binary(y), classes=2)
    test_x, test_y = read_libsvm(_libsvm_path(files, "rcv1/rcv1_test.binary"), RCV1_COLUMNS)
    return Dataset("rcv1", x, _binary(y), classes=2, test_x=test_x, test_y=_binary(test_y))


@dataset(
    "e2006-tfidf",
    About(
        title="Risk from financial reports (E2006-tfidf, LIBSVM)",
        size="16,087 + 3,308 reports, 150,360 features (CSR), a number to predict",
        citation="Kogan, Levin, Routledge, Sagi and Smith (2009), Predicting risk from ..., NAACL",
        remotes=(
            _remote("e2006-tfidf", "regression", "E2006.train.bz2"),
            _remote("e2006-tfidf", "regression", "E2006.test.bz2"),
        ),
        partition="kmeans",
        dtype="float64",
    ),
)
def e2006(files: Files) -> Dataset:
    """Tf-idf of reports, and the log of the stock's volatility; Fed-HT uses the 3,308 test rows."""
    x, y = read_libsvm(_libsvm_path(files, "e2006-tfidf/E2006.train"), E2006_COLUMNS)
    test_x, test_y = read_libsvm(_libsvm_path(files, "e2006-tfidf/E2006.test"), E2006_COLUMNS)
    return Dataset("e2006-tfidf", x, y, test_x=test_x, test_y=test_y)


def _libsvm_path(files: Files, name: str) -> Path:
    return files.path(f"{name}.bz2", name)


@dataset(
    "libsvm",
    About(
        title="Your own LIBSVM file",
        size="depends on the file",
        citation="the file's",
        licence="the file's",
        needs="the option path=FILE",
        partition="iid",
        dtype="float64",
    ),
)
def libsvm(_files: Files, *, path: str, columns: int = 0, task: str = "auto") -> Dataset:
    """Read `path`; task=auto takes whole-numbered targets with at most 100 values as classes."""
    if not Path(path).is_file():
        raise DataError(f"'libsvm': file not found: {path}")
    x, y = read_libsvm(Path(path), columns)
    values, labels = np.unique(y, return_inverse=True)
    few = len(values) <= 100 and bool(np.all(values == np.round(values)))
    if task == "classification" or (task == "auto" and few):
        return Dataset("libsvm", x, labels.astype(np.int64), classes=len(values))
    return Dataset("libsvm", x, y)


@dataset(
    "rcv1-sample",
    About(
        title="A real sample of RCV1 (Vowpal Wabbit's test data)",
        size="1,000 + 500 documents, 47,236 features (CSR), 2 classes",
        citation=_RCV1,
        licence="BSD-3-Clause (Vowpal Wabbit)",
        remotes=(
            Remote(
                "rcv1-sample/rcv1_small.dat",
                (f"{_WABBIT}train-sets/rcv1_small.dat",),
                "sha256:348d59a15f8161852b817fedd45a0a9efa5e2602ea86d9e920ba7079f633e084",
            ),
            Remote(
                "rcv1-sample/rcv1_small_test.data",
                (f"{_WABBIT}test-sets/rcv1_small_test.data",),
                "sha256:c0f5f4a00497c5cec53b47c0ebb8428cc7c364d436ac10f64b5be33d90bfe293",
            ),
        ),
        partition="kmeans",
        dtype="float64",
    ),
)
def rcv1_sample(files: Files) -> Dataset:
    """Log tf-idf of news; labels -1 / +1 become 0 / 1."""
    x, y = read_wabbit(open_text(files.path("rcv1-sample/rcv1_small.dat")), RCV1_COLUMNS)
    lines = open_text(files.path("rcv1-sample/rcv1_small_test.data"))
    test_x, test_y = read_wabbit(lines, RCV1_COLUMNS)
    return Dataset("rcv1-sample", x, _binary(y), classes=2, test_x=test_x, test_y=_binary(test_y))
