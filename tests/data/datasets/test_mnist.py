from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.data.datasets.mnist import read_idx
from parsifl.data.ragged import Array
from parsifl.data.registry import load

CODES = {"uint8": 0x08, "int32": 0x0C, "float32": 0x0D}


def idx(values: Array) -> bytes:
    header = struct.pack(">BBBB", 0, 0, CODES[str(values.dtype)], values.ndim)
    shape = struct.pack(f">{values.ndim}I", *values.shape)
    return header + shape + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write(path: Path, values: Array) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(idx(values)))


def write_mnist(home: Path, folder: str = "mnist") -> tuple[Array, Array]:
    images = np.arange(5 * 784, dtype=np.uint32).astype(np.uint8).reshape(5, 28, 28)
    labels = np.array([3, 1, 4, 1, 5], dtype=np.uint8)
    write(home / folder / "train-images-idx3-ubyte.gz", images)
    write(home / folder / "train-labels-idx1-ubyte.gz", labels)
    write(home / folder / "t10k-images-idx3-ubyte.gz", images[:2])
    write(home / folder / "t10k-labels-idx1-ubyte.gz", labels[:2])
    return images, labels


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_images_and_labels_are_read_as_written(home: Path, name: str) -> None:
    images, labels = write_mnist(home, name)
    data = load(name, home, verify=False)
    assert np.array_equal(np.asarray(data.x)[:, 0], images)
    assert data.y.tolist() == labels.tolist()
    assert data.test_y is not None
    assert len(data.test_y) == 2


def test_files_that_are_already_unzipped_are_found(home: Path) -> None:
    write_mnist(home)
    for path in list((home / "mnist").iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(load("mnist", home)) == 5


def test_every_image_goes_to_its_writer(home: Path) -> None:
    _, labels = write_mnist(home)
    rows = np.zeros((5, 8), dtype=np.int32)
    rows[:, 0], rows[:, 2] = labels, [30, 10, 30, 20, 10]
    write(home / "qmnist/qmnist-train-labels-idx2-int.gz", rows)
    rows[:, 2] = 40
    write(home / "qmnist/qmnist-test-labels-idx2-int.gz", rows)
    data = load("mnist-writers", home, verify=False)
    assert data.groups is not None
    assert data.test_groups is not None
    assert data.groups.tolist() == [2, 0, 2, 1, 0]
    assert data.test_groups.tolist() == [3, 3]
    assert data.group_names == ("writer 10", "writer 20", "writer 30", "writer 40")
    rows[0, 0] = 9
    write(home / "qmnist/qmnist-train-labels-idx2-int.gz", rows)
    with pytest.raises(DataError, match="do not match MNIST's"):
        load("mnist-writers", home, verify=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "not an idx file"),
        (b"\0\0\x08\x03\0\0", "ends inside its header"),
        (idx(np.zeros((2, 3), dtype=np.uint8))[:-1], "5 bytes of data, expected 6"),
    ],
)
def test_malformed_idx_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a")


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(np.zeros(9, dtype=np.float32)))[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "a.gz")


def test_the_real_files_have_the_published_counts(real: Path) -> None:
    for name in ("mnist", "fashion-mnist"):
        data = load(name, real)
        assert data.x.shape == (60000, 1, 28, 28)
        assert data.test_x is not None
        assert data.test_x.shape == (10000, 1, 28, 28)
    assert np.bincount(load("fashion-mnist", real).y).tolist() == [6000] * 10
    assert np.bincount(load("mnist", real).y)[:3].tolist() == [5923, 6742, 5958]


def test_the_real_writers_have_the_known_counts(real: Path) -> None:
    data = load("mnist-writers", real)
    assert data.groups is not None
    assert data.test_groups is not None
    counts = np.unique(data.groups, return_counts=True)[1]
    assert [len(counts), counts.min(), counts.max(), np.median(counts)] == [539, 19, 131, 116]
    assert len(np.unique(data.test_groups)) == 297
    assert len(np.intersect1d(data.groups, data.test_groups)) == 0
