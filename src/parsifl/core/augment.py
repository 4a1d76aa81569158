"""Augmentation of image batches, drawn by key so that every engine sees the same images."""

from __future__ import annotations

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.core.errors import ConfigError, unknown

PAD = 4
DEGREES = 30.0
_ROTATED = "flip-rotate"
# name -> (probability of a flip, probability of a random crop after padding by four)
RECIPES: dict[str, tuple[float, float]] = {
    "": (0.0, 0.0),
    "flip": (0.5, 0.0),
    "flip-crop": (0.5, 1.0),
    "flip-half-crop": (0.5, 0.5),  # FedSLR crops every second image
    _ROTATED: (0.5, 0.0),  # PerFedMask rotates DomainNet by up to 30 degrees
}


def apply(name: str, images: Tensor, key: Tensor) -> Tensor:
    """Flip and crop or rotate a batch of images [B, C, H, W]; the border is filled with zeros.

    Written with `gather` over computed source positions, so that it runs under vmap with one draw
    per image.
    """
    if name not in RECIPES:
        raise ConfigError(unknown("augmentation", name, RECIPES))
    if not name:
        return images
    flip_share, crop_share = RECIPES[name]
    count, _, height, width = images.shape
    draws = keys.uniform(key, (4, count))
    flipped = draws[0] < flip_share
    if name == _ROTATED:
        return _rotate(images, flipped, torch.deg2rad((2 * draws[1] - 1) * DEGREES))
    cropped = (draws[1] < crop_share).to(torch.int64)
    down, right = ((draws[i] * (2 * PAD + 1)).to(torch.int64) - PAD for i in (2, 3))
    rows, inside_rows = _sources(down * cropped, height, torch.zeros_like(flipped))
    columns, inside_columns = _sources(right * cropped, width, flipped)
    shape = images.shape
    moved = images.gather(2, rows[:, None, :, None].expand(shape))
    moved = moved.gather(3, columns[:, None, None, :].expand(shape))
    inside = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    return moved * inside.to(images.dtype)


def _sources(shift: Tensor, size: int, mirrored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source position of each output position per image, and whether it is inside."""
    position = torch.arange(size, device=shift.device)[None] + shift[:, None]
    inside = (position >= 0) & (position < size)
    position = position.clamp(0, size - 1)
    return torch.where(mirrored[:, None], size - 1 - position, position), inside


def _rotate(images: Tensor, flipped: Tensor, angle: Tensor) -> Tensor:
    """Flip, then rotate about the centre; every output position reads the nearest pixel."""
    height, width = images.shape[2:]
    y = (torch.arange(height, device=images.device) - (height - 1) / 2)[None, :, None]
    x = (torch.arange(width, device=images.device) - (width - 1) / 2)[None, None, :]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    rows = (cos * y + sin * x + (height - 1) / 2).round().to(torch.int64)
    columns = (cos * x - sin * y + (width - 1) / 2).round().to(torch.int64)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    columns = torch.where(flipped[:, None, None], width - 1 - columns, columns)
    sources = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    flat = images.flatten(2)
    moved = flat.gather(2, sources.flatten(1)[:, None].expand(flat.shape))
    return moved.reshape(images.shape) * inside[:, None].to(images.dtype)
