"""Augmentation of image batches, drawn by key so that every engine sees the same images."""

from __future__ import annotations

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.core.errors import ConfigError, unknown

PAD = 4
# name -> (probability of a flip, probability of a random crop after padding by four)
RECIPES: dict[str, tuple[float, float]] = {
    "": (0.0, 0.0),
    "flip": (0.5, 0.0),
    "flip-crop": (0.5, 1.0),
    "flip-half-crop": (0.5, 0.5),  # FedSLR crops every second image
}


def apply(name: str, images: Tensor, key: Tensor) -> Tensor:
    """Flip and crop a batch of images [B, C, H, W]; a crop is a shift with zeros coming in.

    Written with `gather` over computed source positions: it runs under vmap, one draw an image.
    """
    if name not in RECIPES:
        raise ConfigError(unknown("augmentation", name, RECIPES))
    if not name:
        return images
    flip_share, crop_share = RECIPES[name]
    count, _, height, width = images.shape
    draws = keys.uniform(key, (4, count))
    flipped = draws[0] < flip_share
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
    """For each image: which source position each output position reads, and is it inside."""
    position = torch.arange(size, device=shift.device)[None] + shift[:, None]
    inside = (position >= 0) & (position < size)
    position = position.clamp(0, size - 1)
    return torch.where(mirrored[:, None], size - 1 - position, position), inside
