from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import ConfigError, DataError
from parsifl.data.datasets.image_folders import read_images
from parsifl.data.registry import load


@pytest.fixture
def pillow() -> Any:
    return pytest.importorskip("PIL.Image", reason="pillow decodes pictures")


def paint(pillow: Any, path: Path, colour: tuple[int, int, int], size: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow.new("RGB", (size, size), colour).save(path, format="PNG")


def test_tiny_imagenet_is_read_from_its_folders(home: Path, pillow: Any) -> None:
    top = home / "tiny-imagenet/tiny-imagenet-200"
    for number, name in enumerate(("n02", "n01")):
        for picture in range(2):
            path = top / f"train/{name}/images/{name}_{picture}.JPEG"
            paint(pillow, path, (number * 100, 10, 20))
    (top / "wnids.txt").write_text("n02\nn01\n")
    paint(pillow, top / "val/images/val_0.JPEG", (7, 8, 9))
    (top / "val/val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")
    data = load("tiny-imagenet", home)
    assert data.x.shape == (4, 3, 64, 64)
    assert data.y.tolist() == [0, 0, 1, 1]
    assert np.asarray(data.x)[2, :, 3, 3].tolist() == [100, 10, 20]
    assert data.test_y is not None
    assert data.test_y.tolist() == [1]
    assert np.asarray(data.test_x)[0, :, 0, 0].tolist() == [7, 8, 9]


@pytest.fixture
def domains(home: Path, pillow: Any) -> Path:
    for number, domain in enumerate(("clipart", "real")):
        lines = []
        for label, name in ((22, "bird"), (340, "zebra"), (1, "airplane")):
            picture = f"{domain}/{name}/{domain}_{label}_000001.jpg"
            paint(pillow, home / "domainnet" / picture, (label % 256, number, 0), size=100)
            lines.append(f"{picture} {label}")
        for split in ("train", "test"):
            (home / f"domainnet/{domain}_{split}.txt").write_text("\n".join(lines) + "\n")
    return home


def test_domainnet_keeps_the_chosen_domains_and_classes(domains: Path) -> None:
    data = load("domainnet", domains, verify=False, domains="real+clipart", size=16)
    assert data.x.shape == (4, 3, 16, 16)
    assert data.y.tolist() == [0, 1, 0, 1]
    assert data.classes == 2
    assert data.groups is not None
    assert [data.group_names[g] for g in data.groups] == ["real", "real", "clipart", "clipart"]
    assert np.asarray(data.x)[0, 1].min() == 1
    assert data.test_x is not None
    every = load("domainnet", domains, verify=False, domains="real", classes="all", size=16)
    assert every.classes == 3


def test_domainnet_refuses_unknown_domains_and_classes(domains: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'clipart'"):
        load("domainnet", domains, domains="cliparts")
    with pytest.raises(DataError, match="none of the classes dragon"):
        load("domainnet", domains, verify=False, domains="real", classes="dragon")


def test_an_unreadable_image_is_named(tmp_path: Path, pillow: Any) -> None:
    assert pillow is not None
    (tmp_path / "a.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"a\.jpg cannot be read as an image"):
        read_images([tmp_path / "a.jpg"], 8)


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'parsifl\[images\]'"):
        read_images([], 8)
