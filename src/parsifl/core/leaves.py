"""Compact leaves that can replace a tensor in a state or a message.

A plain tensor is the dense form (the codec detects its zeros), and a layer that is not sent is a
missing key. `Sparse` and `LowRank` are for algorithms that already hold the parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parsifl.core import tree


@dataclass(frozen=True)
class Sparse(tree.Addend):
    """A tensor of `shape` that is zero except for `value` at ascending flat positions `index`."""

    index: Tensor
    value: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """Return the tensor itself."""
        flat = self.value.new_zeros(math.prod(self.shape))
        return flat.scatter(0, self.index, self.value).reshape(self.shape)

    def add_into(self, total: Tensor, factor: float) -> None:
        """Add in place, touching only the positions in `index`.

        >>> import torch
        >>> total = torch.zeros(2)
        >>> Sparse(torch.tensor([1]), torch.ones(1), (2,)).add_into(total, 3.0)
        >>> total
        tensor([0., 3.])
        """
        total.put_(self.index, factor * self.value, accumulate=True)


@dataclass(frozen=True)
class LowRank:
    """A tensor of `shape` whose matricised form is `left @ right`, of rank r.

    >>> import torch
    >>> LowRank(torch.ones(2, 1), torch.ones(1, 3), (2, 3)).dense().shape
    torch.Size([2, 3])
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """Return the tensor itself."""
        return dematricize(self.left @ self.right, self.shape)


UNITS = (Sparse, LowRank)
"""The compact leaves; `tree.flatten(message, units=UNITS)` does not split them."""


def factored(left: Tensor, right: Tensor, shape: tuple[int, ...]) -> LowRank | Tensor:
    """Return factors if they are shorter than the tensor, r (d1 + d2) < d1 d2, else the tensor."""
    message = LowRank(left, right, shape)
    shorter = left.numel() + right.numel() < math.prod(shape)
    return message if shorter else message.dense()


def matricize(tensor: Tensor) -> Tensor:
    """Turn a layer into a matrix: a convolution o x i x k1 x k2 becomes (o k1) x (i k2)."""
    if tensor.ndim == 4:
        out, inner, height, width = tensor.shape
        return tensor.swapaxes(1, 2).reshape(out * height, inner * width)
    return tensor.reshape(tensor.shape[0], -1)


def dematricize(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `matricize`."""
    if len(shape) == 4:
        out, inner, height, width = shape
        return matrix.reshape(out, height, inner, width).swapaxes(1, 2).contiguous()
    return matrix.reshape(shape)


def densify(value: Any) -> Any:
    """Return a tree with every compact leaf converted to a dense tensor."""
    leaves, structure = tree.flatten(value, units=UNITS)
    dense = [leaf.dense() if isinstance(leaf, UNITS) else leaf for leaf in leaves]
    return tree.unflatten(dense, structure)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix that `matricize` makes of a tensor of this shape.

    >>> matrix_shape((8, 4, 3, 5))
    (24, 20)
    """
    if len(shape) == 4:
        return shape[0] * shape[2], shape[1] * shape[3]
    return shape[0], math.prod(shape[1:])
