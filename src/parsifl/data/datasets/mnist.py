"""MNIST, Fashion-MNIST, and MNIST by writer (idx files)."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array
from parsifl.data.registry import About, Remote, dataset

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_WRITER_FILES = ("qmnist-train-labels-idx2-int.gz", "qmnist-test-labels-idx2-int.gz")
_WRITER_COLUMN = 2
_MNIST_HOSTS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION_HOSTS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_QMNIST_HOSTS = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)


def _remotes(
    folder: str, hosts: tuple[str, ...], names: tuple[str, ...], sums: tuple[str, ...]
) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{folder}/{name}", tuple(host + name for host in hosts), f"sha256:{digest}")
        for name, digest in zip(names, sums, strict=True)
    )


_MNIST = _remotes(
    "mnist",
    _MNIST_HOSTS,
    _FILES,
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)
_FASHION = _remotes(
    "fashion-mnist",
    _FASHION_HOSTS,
    _FILES,
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)
_QMNIST = _remotes(
    "qmnist",
    _QMNIST_HOSTS,
    _WRITER_FILES,
    (
        "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
        "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
    ),
)
_CITATION = "LeCun, Bottou, Bengio and Haffner (1998), Gradient-based learning ..., Proc. IEEE"


def read_idx(path: Path) -> Array:
    """Read an idx file (gzipped or not) into an array of its own type."""
    opener = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with opener(path, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise DataError(f"{path} is not an idx file (wrong first bytes)")
    header = 4 + 4 * content[3]
    kind = np.dtype(_TYPES[content[2]])
    if len(content) < header:
        raise DataError(f"{path} ends inside its header")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    expected = math.prod(shape) * kind.itemsize
    if len(content) - header != expected:
        raise DataError(f"{path} holds {len(content) - header} bytes of data, expected {expected}")
    values = np.frombuffer(content, kind, offset=header).reshape(shape)
    return values.astype(kind.newbyteorder("="))


def _read(files: Files, folder: str) -> Dataset:
    images, labels, test_images, test_labels = (
        read_idx(files.path(f"{folder}/{name}", f"{folder}/{name.removesuffix('.gz')}"))
        for name in _FILES
    )
    return Dataset(
        name=folder,
        x=images[:, None],
        y=labels.astype(np.int64),
        classes=10,
        test_x=test_images[:, None],
        test_y=test_labels.astype(np.int64),
    )


@dataset(
    "mnist",
    About(
        title="MNIST handwritten digits",
        size="60,000 + 10,000 images of 28 x 28, 10 classes",
        citation=_CITATION,
        remotes=_MNIST,
        normalize="pixel",
    ),
)
def mnist(files: Files) -> Dataset:
    """Gray levels 0 to 255, with the official test split."""
    return _read(files, "mnist")


@dataset(
    "fashion-mnist",
    About(
        title="Fashion-MNIST articles of clothing",
        size="60,000 + 10,000 images of 28 x 28, 10 classes",
        citation="Xiao, Rasul and Vollgraf (2017), arXiv:1708.07747",
        licence="MIT",
        remotes=_FASHION,
        normalize="pixel",
    ),
)
def fashion_mnist(files: Files) -> Dataset:
    """Gray levels 0 to 255, with the official test split."""
    return _read(files, "fashion-mnist")


@dataset(
    "mnist-writers",
    About(
        title="MNIST by writer: MNIST's images with the writer ids of QMNIST",
        size="60,000 images by 539 writers + 10,000 by 297 others",
        citation=f"{_CITATION}; Yadav and Bottou (2019), Cold case: the lost MNIST digits",
        licence="BSD (QMNIST labels)",
        remotes=(*_MNIST, *_QMNIST),
        normalize="pixel",
        partition="natural-id",
    ),
)
def mnist_writers(files: Files) -> Dataset:
    """Assign every image to its NIST writer; no writer is in both official splits.

    QMNIST rebuilt the test set to 60,000 images; its first 10,000 are MNIST's, row by row.
    """
    digits = _read(files, "mnist")
    labels = digits.merged().y
    train, test = (read_idx(files.path(f"qmnist/{name}")) for name in _WRITER_FILES)
    test = test[: len(labels) - len(train)]
    if not np.array_equal(np.concatenate([train[:, 0], test[:, 0]]), labels):
        raise DataError("'mnist-writers': the QMNIST labels do not match MNIST's, row by row")
    writers, numbers = np.unique(
        np.concatenate([train[:, _WRITER_COLUMN], test[:, _WRITER_COLUMN]]), return_inverse=True
    )
    return replace(
        digits,
        name="mnist-writers",
        groups=numbers[: len(train)].astype(np.int64),
        test_groups=numbers[len(train) :].astype(np.int64),
        group_names=tuple(f"writer {writer}" for writer in writers),
    )
