"""What a method adds to plain SGD: in-place rules on tensors with a leading client axis.

A step is w <- after(w - lr (g + e(w, aux))). A rule subtracts lr * e at the old w in `before_`,
and shrinks, thresholds or moves its auxiliary tensors in `after_`. Rules are elementwise or
reduce over the axes behind the first; the same rule serves the generic and the fused path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

Aux = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rule:
    """The rule of plain SGD: nothing is added. Others derive from it."""

    moves_aux: ClassVar[bool] = False
    """Whether `after_` changes the auxiliary tensors (then each client gets its own copy)."""

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr * e(w, aux) from w in place, before the gradient lands."""

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Change w (and, if `moves_aux`, aux) in place after the gradient landed."""


@final
@dataclass(frozen=True)
class Affine(Rule):
    """e(w) = decay * w + aux[0]: proximal terms, control variates, duals, weight decay."""

    decay: float = 0.0

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr (decay * w + aux[0])."""
        if self.decay:
            w.mul_(1 - lr * self.decay)
        w.sub_(aux[0], alpha=lr)


def soft(values: Tensor, shrink: float | Tensor) -> Tensor:
    """Return the values moved towards zero by `shrink`: the proximal operator of shrink * |.|_1.

    A difference, not a product with the sign: that would leave -0, which is not a zero on the wire.

    >>> import torch
    >>> soft(torch.tensor([3.0, -0.5, -2.0]), 1.0).tolist()
    [2.0, 0.0, -1.0]
    """
    limit: Any = shrink  # torch types numbers and tensors apart
    return values - values.clamp(-limit, limit)


def soften_(values: Tensor, shrink: float) -> None:
    """Do the same in place."""
    values.sub_(values.clamp(-shrink, shrink))
