from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.data.datasets.cifar import read_batch
from parsifl.data.ragged import Array
from parsifl.data.registry import load


def records(labels: list[list[int]], first: int) -> tuple[bytes, Array]:
    images = (np.arange(len(labels) * 3072) % 251 + first).astype(np.uint8)
    rows = np.concatenate(
        [np.array(labels, dtype=np.uint8), images.reshape(len(labels), 3072)], axis=1
    )
    return rows.tobytes(), images.reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("folder", ["cifar-10", "cifar-10-batches-bin"])
def test_cifar_10_batches_are_joined_in_order(home: Path, folder: str) -> None:
    (home / folder).mkdir()
    written = []
    for number in range(1, 6):
        content, images = records([[number], [0]], first=number)
        (home / folder / f"data_batch_{number}.bin").write_bytes(content)
        written.append(images)
    (home / folder / "test_batch.bin").write_bytes(records([[9]], 0)[0])
    data = load("cifar-10", home, verify=False)
    assert np.array_equal(np.asarray(data.x), np.concatenate(written))
    assert data.y.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert data.test_y is not None
    assert data.test_y.tolist() == [9]


def test_cifar_100_takes_the_fine_label(home: Path) -> None:
    (home / "cifar-100").mkdir()
    content, images = records([[7, 99], [3, 12]], 0)
    (home / "cifar-100/train.bin").write_bytes(content)
    (home / "cifar-100/test.bin").write_bytes(content)
    data = load("cifar-100", home)
    assert data.y.tolist() == [99, 12]
    assert np.array_equal(np.asarray(data.x), images)
    assert data.classes == 100


def test_a_cut_batch_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * 3074)
    with pytest.raises(DataError, match="3074 bytes, not a multiple of 3073"):
        read_batch(tmp_path / "a.bin", 1)


def test_the_real_cifar_10_has_the_published_counts(real: Path) -> None:
    if not any((real / name).is_dir() for name in ("cifar-10", "cifar-10-batches-bin")):
        pytest.skip("the data folder (PARSIFL_DATA) has no CIFAR-10")
    data = load("cifar-10", real)
    assert data.x.shape == (50000, 3, 32, 32)
    assert np.bincount(data.y).tolist() == [5000] * 10
    assert data.test_y is not None
    assert np.bincount(data.test_y).tolist() == [1000] * 10
