"""Folders of images: DomainNet by domain, Tiny ImageNet."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.core.errors import ConfigError, DataError, unknown
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.ragged import Array
from parsifl.data.registry import About, Remote, dataset

_NEEDS = "pillow, to decode the images: pip install 'parsifl[images]'"
_BU = "https://csr.bu.edu/ftp/visda/2019/multi-source/"
# name: (folder at the host, md5 of the archive, of the training list, of the test list)
_DOMAINS = {
    "clipart": (
        "groundtruth/",
        "cd0d8f2d77a4e181449b78ed62bccf1e",
        "b4349693a7f9c05c53955725c47ed6cb",
        "f5ddbcfd657a3acf9d0f7da10db22565",
    ),
    "infograph": (
        "",
        "720380b86f9e6ab4805bb38b6bd135f8",
        "379b50054f4ac2018dca4f89421b92d9",
        "779626b50869edffe8ea6941c3755c71",
    ),
    "painting": (
        "groundtruth/",
        "1ae32cdb4f98fe7ab5eb0a351768abfd",
        "7db0e7ca73ad9982f6e1f7f3ef372c0a",
        "232b35dc53f26d414686ae579e38d9b5",
    ),
    "quickdraw": (
        "",
        "bdc1b6f09f277da1a263389efe0c7a66",
        "b732ced3939ac8efdd8c0a889dca56cc",
        "c1a828fdfe216fb109f1c0083a252c6f",
    ),
    "real": (
        "",
        "dcc47055e8935767784b7162e7c7cca6",
        "8ebf02c2075fadd564705f0dc7cd6291",
        "6098816791c3ebed543c71ffa11b9054",
    ),
    "sketch": (
        "",
        "658d8009644040ff7ce30bb2e820850f",
        "1233bd18aa9a8a200bf4cecf1c34ef3e",
        "d8a222e4672cfd585298aa14d02ea441",
    ),
}
_TEN_CLASSES = "bird+feather+headphones+ice_cream+teapot+tiger+whale+windmill+wine_glass+zebra"
_TINY = "tiny-imagenet/tiny-imagenet-200"


def _domain_remotes() -> tuple[Remote, ...]:
    remotes = []
    for domain, (folder, archive, train, test) in _DOMAINS.items():
        remotes.append(
            Remote(
                f"domainnet/{domain}.zip",
                (f"{_BU}{folder}{domain}.zip",),
                f"md5:{archive}",
                ((f"domainnet/{domain}", ""),),
            )
        )
        for split, digest in (("train", train), ("test", test)):
            name = f"{domain}_{split}.txt"
            url = f"{_BU}domainnet/txt/{name}"
            remotes.append(Remote(f"domainnet/{name}", (url,), f"md5:{digest}"))
    return tuple(remotes)


def read_images(paths: Sequence[Path], size: int) -> Array:
    """Decode images as samples x 3 x size x size, uint8."""
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(f"this dataset needs {_NEEDS}") from error
    pixels = np.empty((len(paths), 3, size, size), dtype=np.uint8)
    for number, path in enumerate(paths):
        try:
            with image.open(path) as opened:
                square = opened.convert("RGB")
                if square.size != (size, size):
                    square = square.resize((size, size), image.Resampling.BILINEAR)
                pixels[number] = np.asarray(square).transpose(2, 0, 1)
        except OSError as error:
            raise DataError(f"{path} cannot be read as an image: {error}") from error
    return pixels


@dataset(
    "domainnet",
    About(
        title="DomainNet: objects in six styles (cleaned version)",
        size="0.6 million images, 6 domains, 345 classes (10 by default)",
        citation="Peng, Bai, Xia, Huang, Saenko and Wang (2019), Moment matching ..., ICCV",
        licence="fair use notice of the authors: research only",
        needs=_NEEDS,
        remotes=_domain_remotes(),
        normalize="channel",
        partition="natural-id",
    ),
)
def domainnet(
    files: Files, *, domains: str = "all", classes: str = _TEN_CLASSES, size: int = 64
) -> Dataset:
    """Read the chosen domains (clipart+real ...) and classes (names joined by +, or all).

    The ten default classes are those of FedBN. Images are resized to size x size.
    """
    chosen = list(_DOMAINS) if domains == "all" else domains.split("+")
    for domain in chosen:
        if domain not in _DOMAINS:
            raise ConfigError(unknown("domain", domain, _DOMAINS))
    wanted = None if classes == "all" else classes.split("+")
    parts = {
        split: [_domain_rows(files, domain, split, wanted) for domain in chosen]
        for split in ("train", "test")
    }
    names = sorted({name for rows in parts["train"] + parts["test"] for _, name in rows})
    if not names:
        raise DataError(f"'domainnet': none of the classes {classes} is in the lists")
    x, y, groups = _stacked(parts["train"], names, size)
    test_x, test_y, test_groups = _stacked(parts["test"], names, size)
    return Dataset(
        "domainnet",
        x,
        y,
        classes=len(names),
        groups=groups,
        group_names=tuple(chosen),
        test_x=test_x,
        test_y=test_y,
        test_groups=test_groups,
    )


def _domain_rows(
    files: Files, domain: str, split: str, wanted: list[str] | None
) -> list[tuple[Path, str]]:
    """Return (image, class name) for the lines `domain/class/image.jpg number` of a list."""
    name = f"{domain}_{split}.txt"
    lines = files.path(f"domainnet/{name}", f"domainnet/splits/{name}").read_text().splitlines()
    home = files.path(f"domainnet/{domain}").parent
    pairs = [(home / line.rsplit(" ", 1)[0], line.split("/")[1]) for line in lines if line.strip()]
    return [pair for pair in pairs if wanted is None or pair[1] in wanted]


def _stacked(
    parts: list[list[tuple[Path, str]]], names: list[str], size: int
) -> tuple[Array, Array, Array]:
    rows = [pair for part in parts for pair in part]
    groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts]).astype(np.int64)
    number = {name: position for position, name in enumerate(names)}
    labels = np.array([number[name] for _, name in rows], dtype=np.int64)
    return read_images([path for path, _ in rows], size), labels, groups


@dataset(
    "tiny-imagenet",
    About(
        title="Tiny ImageNet (200 classes of ImageNet at 64 x 64)",
        size="100,000 + 10,000 images of 3 x 64 x 64, 200 classes",
        citation="Le and Yang (2015), Tiny ImageNet visual recognition challenge, Stanford CS231n",
        needs=_NEEDS,
        remotes=(
            Remote(
                "tiny-imagenet/tiny-imagenet-200.zip",
                ("https://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                "md5:90528d7ca1a48142e341f4ef8d21d0de",
                ((f"{_TINY}/wnids.txt", ""),),
            ),
        ),
        normalize="channel",
        augment="flip-crop",
    ),
)
def tiny_imagenet(files: Files) -> Dataset:
    """Read the training images; the official validation split (it has labels) is the test."""
    home = files.path(f"{_TINY}/wnids.txt", "tiny-imagenet-200/wnids.txt").parent
    names = (home / "wnids.txt").read_text().split()
    train = [(p, n) for n in names for p in sorted((home / "train" / n / "images").glob("*.JPEG"))]
    lines = (home / "val/val_annotations.txt").read_text().splitlines()
    notes = [line.split("\t") for line in lines if line]
    test = [(home / "val/images" / note[0], note[1]) for note in notes]
    x, y, _ = _stacked([train], names, 64)
    test_x, test_y, _ = _stacked([test], names, 64)
    return Dataset("tiny-imagenet", x, y, classes=len(names), test_x=test_x, test_y=test_y)
