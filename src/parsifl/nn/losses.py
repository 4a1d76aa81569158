"""The losses of networks, row by row."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from parsifl.core._functorch import is_transformed

Loss = Literal["cross-entropy", "mse"]


def row_loss(kind: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each row."""
    if kind == "cross-entropy" and output.ndim == 2 and y.ndim == 1 and is_transformed():
        # what vmap makes of the other one takes a third longer
        return -functional.log_softmax(output, -1).gather(1, y.unsqueeze(1)).squeeze(1)
    if kind == "cross-entropy":
        return functional.cross_entropy(output, y, reduction="none")
    return (output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(-1)
