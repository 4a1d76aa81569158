"""Proximal SGD for a component p that is added to a fixed offset w: minimize f(w + p) + R(p).

The walk is done in z = w + p, so the loss is the problem's own and every executor that knows plain
SGD knows this one too; only the rule sees the offset, as a constant tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

from torch import Tensor

from parsifl.core import tree
from parsifl.core.batching import Batches
from parsifl.core.problem import Params, Problem, split_buffers
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.solvers.svt import svt_stack
from parsifl.solvers.update_rules import Aux, Rule

Penalty = Literal["sparse", "low-rank"]


@final
@dataclass(frozen=True)
class ProximalRule(Rule):
    """z <- w + prox(z - w) after each step, with weight decay on z - w; w = aux[0], or 0.

    "sparse" is the l1 norm (soft thresholding of every entry), "low-rank" the nuclear norm
    (of matrices and convolutions; other tensors are left alone).
    """

    penalty: Penalty = "sparse"
    strength: float = 0.0
    weight_decay: float = 0.0

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr * decay * (z - w)."""
        if self.weight_decay:
            w.mul_(1 - lr * self.weight_decay)
            if aux:
                w.add_(aux[0], alpha=lr * self.weight_decay)

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Apply the proximal operator of lr * strength * R around the offset."""
        if not self.strength:
            return
        if aux:
            w.sub_(aux[0])
        if self.penalty == "low-rank":
            w.copy_(svt_stack(w, lr * self.strength))
        else:
            w.sub_(w.clamp(min=-lr * self.strength, max=lr * self.strength))
        # where the operator gave zero, z is now w bit for bit, and z - w an exact zero again
        if aux:
            w.add_(aux[0])


def fit_component(
    problem: Problem,
    offset: Params,
    component: Params,
    batches: Batches,
    config: SgdConfig,
    *,
    penalty: Penalty,
    strength: float,
) -> Params:
    """Return the component p after one proximal step of f(offset + p) for each batch.

    Weight decay applies to p, not to the offset. Buffers of the component are those of the sum: the
    forward pass of f(offset + p) moves them.
    """
    if len(batches) == 0:
        return component
    rule = ProximalRule(penalty, strength, config.weight_decay)
    config = replace(config, weight_decay=0.0)  # the rule has it
    fixed, _ = split_buffers(problem, offset)
    start = combine(problem, offset, component)
    mixed = sgd(problem, start, batches, config, rule=rule, aux=(fixed,))
    moved, buffers = split_buffers(problem, mixed)
    return {**tree.subtract(moved, fixed), **buffers}


def combine(problem: Problem, offset: Params, component: Params) -> Params:
    """Return offset + p, with the buffers of the component."""
    fixed, _ = split_buffers(problem, offset)
    part, buffers = split_buffers(problem, component)
    return {**tree.axpy(1.0, part, fixed), **buffers}
