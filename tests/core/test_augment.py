from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parsifl.core import augment, keys
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key


def images(count: int = 200, channels: int = 2, height: int = 7, width: int = 9) -> Tensor:
    size = (count, channels, height, width)
    return 1 + torch.rand(size, generator=Key(0).torch_generator(), dtype=torch.float64)


def candidates(image: Tensor, shift: int) -> dict[tuple[bool, int, int], Tensor]:
    """All flips and shifts of one image, by padding and cutting."""
    _, height, width = image.shape
    found = {}
    for flipped in (False, True):
        source = image.flip(-1) if flipped else image
        padded = torch.nn.functional.pad(source, (shift, shift, shift, shift))
        for down in range(2 * shift + 1):
            for right in range(2 * shift + 1):
                cut = padded[:, down : down + height, right : right + width]
                found[flipped, down - shift, right - shift] = cut
    return found


def test_nothing_changes_without_a_name() -> None:
    x = images(3)
    assert augment.apply("", x, Key(1).tensor()) is x


def test_half_of_the_pictures_are_flipped() -> None:
    x = images()
    moved = augment.apply("flip", x, Key(1).tensor())
    same = (moved == x).flatten(1).all(1)
    flipped = (moved == x.flip(-1)).flatten(1).all(1)
    assert bool((same | flipped).all())
    assert 70 < int(flipped.sum()) < 130


@pytest.mark.parametrize(("name", "cropped"), [("flip-crop", 1.0), ("flip-half-crop", 0.5)])
def test_every_crop_is_a_shift_with_zeros_coming_in(name: str, cropped: float) -> None:
    x = images(60)
    moved = augment.apply(name, x, Key(2).tensor())
    seen = set()
    still = 0
    for picture, result in zip(x, moved, strict=True):
        matches = [m for m, c in candidates(picture, augment.PAD).items() if torch.equal(c, result)]
        assert len(matches) == 1
        seen.add(matches[0])
        still += matches[0][1:] == (0, 0)
    assert len({s[1] for s in seen}) > 5  # many different shifts, both ways
    assert len({s[2] for s in seen}) > 5
    assert still / 60 == pytest.approx(1 - cropped * 80 / 81, abs=0.2)


def test_the_same_key_gives_the_same_pictures_in_a_batch_of_clients() -> None:
    x = images(24)
    keys = torch.stack([Key(0, client=i).tensor() for i in range(3)])
    groups = x.reshape(3, 8, *x.shape[1:])
    batched = torch.func.vmap(lambda g, k: augment.apply("flip-crop", g, k))(groups, keys)
    for i in range(3):
        assert torch.equal(batched[i], augment.apply("flip-crop", groups[i], keys[i]))
    assert not torch.equal(
        augment.apply("flip-crop", groups[0], keys[0]),
        augment.apply("flip-crop", groups[0], keys[1]),
    )


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown augmentation 'flop'; did you mean 'flip'"):
        augment.apply("flop", images(1), Key(0).tensor())


def test_rotations_of_at_most_thirty_degrees_read_the_nearest_pixel() -> None:
    x = images(40, channels=1, height=8, width=8)
    key = Key(3).tensor()
    moved = augment.apply("flip-rotate", x, key)
    draws = keys.uniform(key, (4, 40))
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    for image, source, flip, turn in zip(moved, x, draws[0], draws[1], strict=True):
        start = source.flip(-1) if flip < 0.5 else source
        angle = math.radians((2 * float(turn) - 1) * 30)
        for row, column in zip(rows.flatten().tolist(), columns.flatten().tolist(), strict=True):
            y, right = row - 3.5, column - 3.5
            from_row = math.cos(angle) * y + math.sin(angle) * right + 3.5
            from_column = math.cos(angle) * right - math.sin(angle) * y + 3.5
            at, beside = round(from_row), round(from_column)
            inside = 0 <= at < 8 and 0 <= beside < 8
            if min(abs(from_row % 1 - 0.5), abs(from_column % 1 - 0.5)) > 1e-4:  # no tie
                expected = float(start[0, at, beside]) if inside else 0.0
                assert float(image[0, row, column]) == expected
    assert float((moved == 0).double().mean()) > 0.01


def test_rotations_are_the_same_in_a_batch_of_clients() -> None:
    x = images(6, height=8, width=8).reshape(2, 3, 2, 8, 8)
    batch = torch.stack([Key(1).tensor(), Key(2).tensor()])
    together = torch.vmap(lambda rows, key: augment.apply("flip-rotate", rows, key))(x, batch)
    for client in range(2):
        alone = augment.apply("flip-rotate", x[client], batch[client])
        assert torch.equal(together[client], alone)
