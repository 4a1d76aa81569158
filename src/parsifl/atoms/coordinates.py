"""The largest coordinates: chosen by partial selection, ties going to the lowest position.

Everything works along the last axis and under `torch.func.vmap`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, count: int) -> Tensor:
    """Mark the `count` entries of largest magnitude.

    >>> largest(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
    [False, True, True, False]
    """
    width = values.shape[-1]
    if count >= width:
        return torch.ones_like(values, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    size = values.abs()
    threshold = size.topk(count, sorted=True).values[..., -1:]
    above = size > threshold
    level = size == threshold
    room = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def positions(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the marks, ascending, in `count` places, and which places are used.

    At most `count` marks may be set; unused places hold position 0.

    >>> index, valid = positions(torch.tensor([False, True, False, True]), 3)
    >>> index.tolist(), valid.tolist()
    ([1, 3, 0], [True, True, False])
    """
    width = mask.shape[-1]
    order = torch.arange(width, device=mask.device).expand(mask.shape)
    rank = torch.where(mask, mask.cumsum(-1) - 1, count)
    spare = torch.zeros_like(rank[..., :1]).expand(*rank.shape[:-1], count + 1)
    index = spare.scatter(-1, rank, order)[..., :count]
    valid = torch.arange(count, device=mask.device) < mask.sum(-1, keepdim=True)
    return torch.where(valid, index, 0), valid


def hard_threshold(values: Tensor, count: int) -> Tensor:
    """Keep the `count` entries of largest magnitude along the last axis: the operator H_tau.

    >>> hard_threshold(torch.tensor([1.0, -3.0, 2.0]), 2)
    tensor([ 0., -3.,  2.])
    """
    return torch.where(largest(values, count), values, 0.0)


def marked(places: tuple[int, ...], width: int) -> Tensor:
    """Return a mask [width] with the given places set."""
    mask = torch.zeros(width, dtype=torch.bool)
    mask[list(places)] = True
    return mask
