"""CIFAR-10 and CIFAR-100 in their binary versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array
from parsifl.data.registry import About, Remote, dataset

_HOST = "https://www.cs.toronto.edu/~kriz/"
_PIXELS = 3 * 32 * 32
_CITATION = "Krizhevsky (2009), Learning multiple layers of features from tiny images"
_TEN = {
    "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
}
_HUNDRED = {"train.bin": "", "test.bin": ""}
_TEN_FOLDERS = ("cifar-10/cifar-10-batches-bin", "cifar-10", "cifar-10-batches-bin")
_HUNDRED_FOLDERS = ("cifar-100/cifar-100-binary", "cifar-100", "cifar-100-binary")


def read_batch(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Read records of `label_bytes` labels and 3,072 pixels; the last label is the finest."""
    record = label_bytes + _PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % record:
        raise DataError(f"{path} holds {len(content)} bytes, not a multiple of {record}")
    rows = content.reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def _read(
    files: Files, folders: tuple[str, ...], names: list[str], label_bytes: int
) -> tuple[Array, Array]:
    batches = [
        read_batch(files.path(*(f"{folder}/{name}" for folder in folders)), label_bytes)
        for name in names
    ]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


@dataset(
    "cifar-10",
    About(
        title="CIFAR-10 small colour images",
        size="50,000 + 10,000 images of 3 x 32 x 32, 10 classes",
        citation=_CITATION,
        remotes=(
            Remote(
                "cifar-10/cifar-10-binary.tar.gz",
                (f"{_HOST}cifar-10-binary.tar.gz",),
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                tuple((f"{_TEN_FOLDERS[0]}/{name}", digest) for name, digest in _TEN.items()),
            ),
        ),
        normalize="channel",
        augment="flip-crop",
    ),
)
def cifar10(files: Files) -> Dataset:
    """Colours 0 to 255, with the official test split."""
    *train, test = _TEN
    x, y = _read(files, _TEN_FOLDERS, train, label_bytes=1)
    test_x, test_y = _read(files, _TEN_FOLDERS, [test], label_bytes=1)
    return Dataset("cifar-10", x, y, classes=10, test_x=test_x, test_y=test_y)


@dataset(
    "cifar-100",
    About(
        title="CIFAR-100 small colour images",
        size="50,000 + 10,000 images of 3 x 32 x 32, 100 classes",
        citation=_CITATION,
        remotes=(
            Remote(
                "cifar-100/cifar-100-binary.tar.gz",
                (f"{_HOST}cifar-100-binary.tar.gz",),
                "md5:03b5dce01913d631647c71ecec9e9cb8",
                tuple((f"{_HUNDRED_FOLDERS[0]}/{name}", sum_) for name, sum_ in _HUNDRED.items()),
            ),
        ),
        normalize="channel",
        augment="flip-crop",
    ),
)
def cifar100(files: Files) -> Dataset:
    """Colours 0 to 255 with the fine labels, and the official test split."""
    train, test = _HUNDRED
    x, y = _read(files, _HUNDRED_FOLDERS, [train], label_bytes=2)
    test_x, test_y = _read(files, _HUNDRED_FOLDERS, [test], label_bytes=2)
    return Dataset("cifar-100", x, y, classes=100, test_x=test_x, test_y=test_y)
