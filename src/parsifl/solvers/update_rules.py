"""The constants of SGD, and what an algorithm adds to a step.

A rule works in place on tensors with a leading client axis. A step is
w <- after(w - lr (g + e(w, aux))). A rule subtracts lr * e at the old w in `before_`, and shrinks,
thresholds or updates its auxiliary tensors in `after_`. Rules are elementwise or reduce over the
axes after the first; the same rule serves the generic and the fused path. A rule that depends on
the parameter returns that of one parameter through `of`. If e is linear, a rule
returns its `line` instead of a `before_`: the fused path then saves a pass over the weights,
because the product that adds the gradient can also scale them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from parsifl.core._functorch import is_transformed

Aux = tuple[Tensor, ...]


@dataclass(frozen=True)
class SgdConfig:
    """The constants of one SGD run: learning rate, momentum and weight decay.

    Momentum is heavy-ball. Both are applied inside the gradient, as in `torch.optim.SGD`.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@final
@dataclass(frozen=True)
class LinearTerm:
    """e(w, aux) = own * w + sum_i others[i] * aux[i]."""

    own: float = 0.0
    others: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rule:
    """The rule of plain SGD, which adds nothing, and the base of other rules."""

    moves_aux: ClassVar[bool] = False
    """Whether `after_` changes the auxiliary tensors (then each client gets its own copy)."""
    takes_step: ClassVar[bool] = False
    """Whether `after_` receives the step -lr (g + e) in w; e must not depend on w then."""

    def of(self, name: str) -> Rule:
        """Return the rule of one parameter; the same for all unless a subclass overrides this.

        `moves_aux`, `takes_step` and `line` must not differ between parameters.
        """
        return self

    def line(self) -> LinearTerm | None:
        """Return e if it is linear; None if only `before_` computes it."""
        return LinearTerm() if type(self).before_ is Rule.before_ else None

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr * e(w, aux) from w in place, before the gradient is added."""
        line = self.line() or LinearTerm()
        if line.own:
            w.mul_(1 - lr * line.own)
        for part, factor in zip(aux, line.others, strict=False):  # `after_` may have more of them
            w.sub_(part, alpha=lr * factor)

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Change w (and, if `moves_aux`, aux) in place after the gradient was added.

        With `takes_step`, w holds the step instead, and the rule sets w to its new value.
        """


@final
@dataclass(frozen=True)
class LinearRule(Rule):
    """e(w) = decay * w + aux[0]: proximal terms, control variates, duals, weight decay."""

    decay: float = 0.0

    def line(self) -> LinearTerm:
        """Return decay * w + aux[0]."""
        return LinearTerm(self.decay, (1.0,))


def soft(values: Tensor, shrink: float | Tensor) -> Tensor:
    """Return the values moved towards zero by `shrink`: the proximal operator of shrink * |.|_1.

    A difference, not a product with the sign, which would give -0, a non-zero in messages.

    >>> import torch
    >>> soft(torch.tensor([3.0, -0.5, -2.0]), 1.0).tolist()
    [2.0, 0.0, -1.0]
    """
    limit: Any = shrink  # torch types numbers and tensors apart
    return values - values.clamp(-limit, limit)


def soften_(values: Tensor, shrink: float) -> None:
    """Soft-threshold in place."""
    values.sub_(values.clamp(-shrink, shrink))


def move_towards_(values: Tensor, goal: Tensor, share: float) -> None:
    """Replace the values by (1 - share) * values + share * goal.

    >>> import torch
    >>> values = torch.tensor([1.0, 2.0])
    >>> move_towards_(values, torch.tensor([3.0, 2.0]), 0.5)
    >>> values.tolist()
    [2.0, 2.0]
    """
    if is_transformed():  # vmap does not support the in-place form of the other one
        values.mul_(1 - share).add_(goal, alpha=share)
    else:
        values.lerp_(goal, share)
