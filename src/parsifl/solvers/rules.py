"""What a method adds to plain SGD: in-place rules on tensors with a leading client axis.

A step is w <- after(w - lr (g + e(w, aux))). A rule subtracts lr * e at the old w in `before_`,
and shrinks, thresholds or moves its auxiliary tensors in `after_`. Rules are elementwise or
reduce over the axes behind the first; the same rule serves the generic and the fused path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
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


@final
@dataclass(frozen=True)
class SoftThreshold(Rule):
    """w <- soft(w, lr * strength) after each step: the proximal operator of strength * |w|_1."""

    strength: float = 0.0

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Shrink towards zero; what is nearer than lr * strength becomes exactly zero."""
        shrink = lr * self.strength
        w.copy_(torch.sign(w) * (w.abs() - shrink).clamp(min=0.0))
