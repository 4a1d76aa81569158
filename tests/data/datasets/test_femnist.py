from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.data.registry import load


def leaf(users: dict[str, list[int]]) -> str:
    data = {
        name: {"x": [[label / 255] * 784 for label in labels], "y": labels}
        for name, labels in users.items()
    }
    return json.dumps({"users": list(users), "num_samples": [], "user_data": data})


def test_leaf_files_keep_digits_and_writers(home: Path) -> None:
    (home / "femnist").mkdir()
    (home / "femnist/all_data_0.json").write_text(leaf({"w2": [3, 40], "w1": [1]}))
    (home / "femnist/all_data_1.json").write_text(leaf({"w3": [9]}))
    data = load("femnist-digits", home)
    assert data.y.tolist() == [3, 1, 9]
    assert data.groups is not None
    assert [data.group_names[g] for g in data.groups] == ["w2", "w1", "w3"]
    assert np.asarray(data.x)[:, 0, 5, 5].tolist() == [3, 1, 9]
    assert data.test_x is None


def test_leafs_own_train_and_test_folders_are_official_splits(home: Path) -> None:
    for split, users in (("train", {"a": [1, 2]}), ("test", {"a": [2]})):
        (home / "femnist" / split).mkdir(parents=True)
        (home / "femnist" / split / "part.json").write_text(leaf(users))
    data = load("femnist-digits", home)
    assert data.test_groups is not None
    assert data.test_groups.tolist() == [0]
    assert len(data) == 2


@pytest.mark.parametrize("text", ["{}", "[1]", "no json"])
def test_what_is_no_leaf_file_is_named(home: Path, text: str) -> None:
    (home / "femnist").mkdir()
    (home / "femnist/all_data_0.json").write_text(text)
    with pytest.raises(DataError, match="not a LEAF file"):
        load("femnist-digits", home)


def test_pixels_beyond_one_and_empty_files_are_refused(home: Path) -> None:
    (home / "femnist").mkdir()
    path = home / "femnist/all_data_0.json"
    user = {"x": [[2.0] * 784], "y": [1]}
    path.write_text(json.dumps({"users": ["w"], "user_data": {"w": user}}))
    with pytest.raises(DataError, match="writer w has pixels outside"):
        load("femnist-digits", home)
    path.write_text(leaf({}))
    with pytest.raises(DataError, match="contain no writers"):
        load("femnist-digits", home)


def test_tffs_files_are_read(home: Path) -> None:
    h5py: Any = pytest.importorskip("h5py", reason="h5py reads TFF's files")
    (home / "femnist").mkdir()
    for split, labels in (("train", [4, 7]), ("test", [7])):
        with h5py.File(home / f"femnist/fed_emnist_digitsonly_{split}.h5", "w") as stream:
            pixels = np.full((len(labels), 28, 28), 1.0, dtype=np.float32)
            stream[f"examples/f1_{split}/pixels"] = pixels
            stream[f"examples/f1_{split}/label"] = np.array(labels, dtype=np.int32)
    data = load("femnist-digits", home)
    assert data.y.tolist() == [4, 7]
    assert data.group_names == ("f1_test", "f1_train")
    assert np.asarray(data.x).min() == 255


def test_without_h5py_the_error_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "femnist").mkdir()
    (home / "femnist/fed_emnist_digitsonly_train.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match="needs h5py"):
        load("femnist-digits", home)
