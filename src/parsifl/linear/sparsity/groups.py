"""Groups of coordinates that live and die together."""

from __future__ import annotations

import torch
from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.linear.sparsity.coordinates import largest

Groups = int | tuple[int, ...]
"""A block length (the last block may be shorter), or the group number of every coordinate."""


def labels(groups: Groups, width: int) -> Tensor:
    """Return the group number of each coordinate.

    >>> labels(2, 5).tolist()
    [0, 0, 1, 1, 2]
    """
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"groups must be a length of at least 1, got {groups}")
        return torch.arange(width) // groups
    if len(groups) != width or min(groups) < 0:
        raise ConfigError(
            f"groups must name a group (0, 1 ...) for each of {width} coefficients, "
            f"got {len(groups)} entries"
        )
    return torch.tensor(groups)


def largest_groups(values: Tensor, count: int, label: Tensor) -> Tensor:
    """Mark the coordinates in the `count` groups of largest Euclidean norm.

    >>> largest_groups(torch.tensor([3.0, 3.0, 4.0, 0.0]), 1, labels(2, 4)).tolist()
    [True, True, False, False]
    """
    spread = label.expand(values.shape)
    number = int(label.max()) + 1
    empty = torch.zeros_like(values[..., :1]).expand(*values.shape[:-1], number)
    energy = empty.scatter_add(-1, spread, values.square())
    return largest(energy, count).gather(-1, spread)
