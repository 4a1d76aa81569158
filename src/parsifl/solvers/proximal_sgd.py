"""Proximal SGD for a component p that is added to a fixed offset w: minimize f(w + p) + R(p).

SGD runs on z = w + p, so the loss is the problem's own and every executor that supports plain SGD
supports this too; only the rule uses the offset and p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from torch import Tensor

from parsifl.core import tree
from parsifl.core.batching import Batches
from parsifl.core.problem import Params, Problem, split_buffers
from parsifl.solvers.sgd import SgdConfig, sgd_pair
from parsifl.solvers.svt import svt_stack
from parsifl.solvers.update_rules import Aux, LinearTerm, Rule, soften_

Penalty = Literal["sparse", "low-rank"]


@final
@dataclass(frozen=True)
class ProximalRule(Rule):
    """w <- prox(w) after each step.

    "sparse" is the l1 norm (soft thresholding of every entry), "low-rank" the nuclear norm
    (of matrices and convolutions; other tensors are unchanged).
    """

    penalty: Penalty = "sparse"
    strength: float = 0.0

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:  # noqa: ARG002 - the contract
        """Apply the proximal operator of lr * strength * R."""
        if not self.strength:
            return
        if self.penalty == "low-rank":
            w.copy_(svt_stack(w, lr * self.strength))
        else:
            soften_(w, lr * self.strength)


@final
@dataclass(frozen=True)
class ComponentRule(Rule):
    """p <- prox(p + step), z <- w + p, with weight decay on p; w = aux[0], p = aux[1].

    p is stored, and takes the step itself. Computed as z - w, both p and the step would be rounded
    to the precision of w.
    """

    moves_aux: ClassVar[bool] = True
    takes_step: ClassVar[bool] = True

    prox: ProximalRule
    weight_decay: float = 0.0

    def line(self) -> LinearTerm | None:
        """Return no term if there is no decay."""
        return None if self.weight_decay else LinearTerm()

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr * decay * p."""
        if self.weight_decay:
            w.sub_(aux[1], alpha=lr * self.weight_decay)

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Add the step to p, apply the operator, and set z to w + p."""
        offset, p = aux
        p.add_(w)
        self.prox.after_(p, (), lr)
        w.copy_(offset + p)


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

    Weight decay applies to p, not to the offset. Buffers of the component are those of the sum,
    updated by the forward pass of f(offset + p).
    """
    if len(batches) == 0:
        return component
    rule = ComponentRule(ProximalRule(penalty, strength), config.weight_decay)
    config = replace(config, weight_decay=0.0)  # the rule has it
    fixed, _ = split_buffers(problem, offset)
    part, _ = split_buffers(problem, component)
    start = combine(problem, offset, component)
    mixed, (_, moved) = sgd_pair(problem, start, batches, config, rule=rule, aux=(fixed, part))
    _, buffers = split_buffers(problem, mixed)
    return {**moved, **buffers}


def combine(problem: Problem, offset: Params, component: Params) -> Params:
    """Return offset + p, with the buffers of the component."""
    fixed, _ = split_buffers(problem, offset)
    part, buffers = split_buffers(problem, component)
    return {**tree.axpy(1.0, part, fixed), **buffers}
