"""Data of the recipes: the paper's own, and the reduced ones of the faithful scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from scipy.ndimage import uniform_filter

from parsifl.core.keys import Key
from parsifl.data import ClientData, prepare
from parsifl.data.dataset import Dataset
from parsifl.data.partitions import partition
from parsifl.data.ragged import Array, Indices, Ragged
from parsifl.data.registry import load
from parsifl_reproduction.perfedmask.networks import COMPONENTS

TEST, VALIDATION = 1 / 6, 1 / 12
"""Shares of a device's 600 rows: 450 train, 50 validate, 100 test."""
DEALT = 100
"""Devices among which the paper deals out CIFAR-10; smaller federations keep the first of them."""
THREE_CLASSES = "pathological:classes=3,assign=dealt,sizes=equal"
LOOKS = ("plain", "inverted", "blurred", "rotated", "noisy", "thresholded")
_PER_LOOK, _DEVICES_PER_LOOK = 3000, 5


@lru_cache(maxsize=1)
def official(name: str, division: str, clients: int, seed: int, data_dir: str | None) -> ClientData:
    """Return a dataset of the paper, divided as in the paper."""
    return prepare(
        name, clients, division, seed=seed, data_dir=data_dir, test=TEST, validation=VALIDATION
    )


@lru_cache(maxsize=1)
def small_images(clients: int, seed: int, data_dir: str | None) -> ClientData:
    """Return CIFAR-10 at 16 x 16: the first of 100 devices with three classes each."""
    dataset = _halved(data_dir)
    dealt = partition(THREE_CLASSES, dataset, DEALT, Key(seed, purpose="data/partition"))
    return _divided(dataset, [dealt[device] for device in range(clients)], seed, "channel")


@lru_cache(maxsize=1)
def small_components(clients: int, seed: int, data_dir: str | None) -> ClientData:
    """Return the principal components of `small_images`."""
    return principal(small_images(clients, seed, data_dir))


@lru_cache(maxsize=1)
def looks(clients: int, seed: int, data_dir: str | None) -> ClientData:
    """Return principal components of six looks of Fashion-MNIST, each split among five devices."""
    dataset = load("fashion-mnist", data_dir).merged()
    draw = Key(seed, purpose="data/looks").numpy_generator()
    rows = draw.permutation(len(dataset))[: _PER_LOOK * len(LOOKS)]
    groups = np.repeat(np.arange(len(LOOKS)), _PER_LOOK)
    images = np.asarray(dataset.x)[rows]
    for number, look in enumerate(LOOKS):
        images[groups == number] = seen(look, images[groups == number], draw)
    shifted = Dataset(
        "fashion-mnist", images, dataset.y[rows], dataset.classes, groups, group_names=LOOKS
    )
    key = Key(seed, purpose="data/partition")
    parts = partition(f"natural-id:split={_DEVICES_PER_LOOK}", shifted, clients, key)
    return principal(_divided(shifted, parts, seed, "unit"))


def seen(look: str, images: Array, draw: np.random.Generator) -> Array:
    """Return images [N, C, H, W] of bytes in another look.

    >>> seen("inverted", np.full((1, 1, 2, 2), 55, np.uint8), np.random.default_rng(0)).max().item()
    200
    """
    if look == "inverted":
        return 255 - images
    if look == "blurred":
        return uniform_filter(images, size=(1, 1, 5, 5))
    if look == "rotated":
        return np.rot90(images, axes=(2, 3))
    if look == "noisy":
        noise = draw.normal(scale=64.0, size=images.shape)
        return np.clip(images + noise, 0, 255).astype(np.uint8)
    if look == "thresholded":
        return np.where(images > 127, 255, 0).astype(np.uint8)
    return images


@lru_cache(maxsize=1)
def _halved(data_dir: str | None) -> Dataset:
    dataset = load("cifar-10", data_dir).merged()
    return replace(dataset, x=halved(np.asarray(dataset.x)))


def halved(images: Array) -> Array:
    """Return images [N, C, H, W] of bytes at half their height and width, by means of 2 x 2.

    >>> halved(np.array([[[[1, 3], [5, 7]]]], np.uint8)).tolist()
    [[[[4]]]]
    """
    count, channels, height, width = images.shape
    squares = images.reshape(count, channels, height // 2, 2, width // 2, 2)
    means: Array = np.rint(squares.mean((3, 5), dtype=np.float32)).astype(np.uint8)
    return means


def _divided(dataset: Dataset, parts: Sequence[Indices], seed: int, normalize: str) -> ClientData:
    """Give each device its rows; rows that no device has are left out."""
    owned = Ragged.of(parts)
    chosen = replace(dataset, x=dataset.x[owned.values], y=dataset.y[owned.values], groups=None)
    return ClientData.from_dataset(
        chosen,
        Ragged.from_sizes(np.arange(len(owned.values)), owned.sizes),
        test=TEST,
        validation=VALIDATION,
        key=Key(seed, purpose="data/split"),
        normalize=normalize,
    )


def principal(data: ClientData, components: int = COMPONENTS) -> ClientData:
    """Return the data in terms of principal components of the training rows, each of variance 1."""
    assert isinstance(data.x, torch.Tensor)
    x = data.x.flatten(1).double()
    train = x[torch.from_numpy(np.unique(Ragged.of(data.train).values))]
    mean = train.mean(0)
    values, vectors = torch.linalg.eigh((train - mean).T @ (train - mean) / len(train))
    scale = vectors[:, -components:] / values[-components:].sqrt()
    return replace(data, x=((x - mean) @ scale.flip(1)).float(), augment="")
