"""Handwritten digits by writer (FEMNIST), from TFF's HDF5 files or from LEAF's JSON files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array, Indices
from parsifl.data.registry import About, Remote, dataset

_NEEDS = "h5py, to read TFF's files (pip install 'parsifl[hdf5]'); LEAF's JSON needs nothing"
_SPLITS = ("train", "test")
_HDF5 = "fed_emnist_digitsonly_{}.h5"


class Writer(NamedTuple):
    """One writer's digits."""

    name: str
    pixels: Array
    labels: Array


def read_leaf(path: Path) -> Iterator[Writer]:
    """Read a JSON file of LEAF, and keep the digits (labels 0 to 9)."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        for name in content["users"]:
            user = content["user_data"][name]
            labels = np.asarray(user["y"], dtype=np.int64)
            digits = labels < 10
            pixels = np.asarray(user["x"], dtype=np.float64).reshape(len(labels), 28, 28)
            yield Writer(name, pixels[digits], labels[digits])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a LEAF file: {error}") from error


def read_hdf5(path: Path) -> Iterator[Writer]:
    """Read an HDF5 file of TFF: examples/WRITER/pixels and examples/WRITER/label."""
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError as error:
        raise DataError(f"'femnist-digits' needs {_NEEDS}") from error
    with h5py.File(path, "r") as stream:
        for name, group in stream["examples"].items():
            labels = np.asarray(group["label"], dtype=np.int64).ravel()
            yield Writer(str(name), np.asarray(group["pixels"], dtype=np.float64), labels)


@dataset(
    "femnist-digits",
    About(
        title="Federated EMNIST, digits only, by writer",
        size="341,873 + 40,832 images of 28 x 28 by 3,383 writers, 10 classes",
        citation="Caldas et al. (2018), LEAF, arXiv:1812.01097; TensorFlow Federated",
        needs=_NEEDS,
        remotes=(
            Remote(
                "femnist/fed_emnist_digitsonly.tar.bz2",
                (
                    "https://storage.googleapis.com/tff-datasets-public/"
                    "fed_emnist_digitsonly.tar.bz2",
                ),
                "sha256:55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
                tuple((f"femnist/{_HDF5.format(split)}", "") for split in _SPLITS),
            ),
        ),
        normalize="unit",
        partition="natural-id",
    ),
)
def femnist_digits(files: Files) -> Dataset:
    """Assign each image to its writer; ink is dark (0) on paper (255), as distributed.

    LEAF's files are used if the folder femnist contains any: all_data_*.json (no test split), or
    train/*.json and test/*.json, as written by LEAF's preprocess.sh. Otherwise TFF's are used.
    """
    folder = files.local("femnist")
    leaf = {split: sorted(folder.glob(f"{split}/*.json")) for split in _SPLITS} if folder else {}
    unsplit = sorted(folder.glob("all_data_*.json")) if folder else []
    if unsplit or leaf.get("train"):
        train = [w for path in unsplit or leaf["train"] for w in read_leaf(path)]
        test = [] if unsplit else [w for path in leaf["test"] for w in read_leaf(path)]
    else:
        train, test = (
            list(read_hdf5(files.path(f"femnist/{_HDF5.format(split)}"))) for split in _SPLITS
        )
    names = sorted({writer.name for writer in train + test})
    x, y, groups = _stacked(train, names)
    test_x, test_y, test_groups = _stacked(test, names) if test else (None, None, None)
    return Dataset(
        "femnist-digits",
        x,
        y,
        classes=10,
        groups=groups,
        group_names=tuple(names),
        test_x=test_x,
        test_y=test_y,
        test_groups=test_groups,
    )


def _stacked(writers: list[Writer], names: list[str]) -> tuple[Array, Array, Indices]:
    if not writers:
        raise DataError("'femnist-digits': the files contain no writers")
    number = {name: position for position, name in enumerate(names)}
    pixels = [_as_bytes(writer) for writer in writers]
    owners = np.array([number[writer.name] for writer in writers], dtype=np.int64)
    return (
        np.concatenate(pixels)[:, None],
        np.concatenate([writer.labels for writer in writers]),
        np.repeat(owners, [len(writer.labels) for writer in writers]),
    )


def _as_bytes(writer: Writer) -> Array:
    """Return gray levels 0 to 255; the files hold the same levels divided by 255."""
    pixels = writer.pixels
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DataError(f"'femnist-digits': writer {writer.name} has pixels outside 0 to 1")
    levels: Array = np.rint(pixels * 255).astype(np.uint8)
    return levels
