"""Two coupled models: a personal one that is trained, and an anchor that follows it.

FedMac and pFedMe share this form. With theta the personal model, w_i the anchor ("local global
model"), eta_p = `lr`, eta = `rate`, phi the smoothed norm rho log cosh(x / rho) and D a
mini-batch, a step is::

    theta <- theta - eta_p (g(theta; D) + decay theta - lam w_i + gamma phi'(theta))
    w_i   <- w_i - eta (lam (w_i - theta) + gamma_w phi'(w_i))

`decay` is 0 for FedMac (correlation) and lam for pFedMe (squared distance).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.core import keys, tree
from parsifl.core.batching import Batch, Batches
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.coordinates import marked
from parsifl.solvers.sgd import SgdConfig, gradient, sgd, sgd_pair
from parsifl.solvers.update_rules import Aux, LinearTerm, Rule, move_towards_, soften_


@final
@dataclass(frozen=True)
class Coupled(Rule):
    """The rule of a personal model with an anchor (aux[0]) that is updated after every step.

    Parameters
    ----------
    rate, lam
        The anchor's step size, and the strength of the coupling.
    decay
        Weight of theta itself in the coupling: 0 for correlation, lam for squared distance.
    gamma, gamma_w, rho
        Strength of the l1 norm on theta and on the anchor; width of its smoothing.
    proximal
        Shrink by the proximal operator of the l1 norm itself, which leaves exact zeros.
    unpenalized
        By parameter, the positions along its last axis that have no l1 norm (an intercept).
    always
        These positions in the rule of one parameter (see `of`).
    """

    moves_aux: ClassVar[bool] = True

    rate: float
    lam: float
    decay: float = 0.0
    gamma: float = 0.0
    gamma_w: float = 0.0
    rho: float = 1e-2
    proximal: bool = False
    unpenalized: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    always: tuple[int, ...] = ()

    def of(self, name: str) -> Coupled:
        """Return the rule with the exempt positions of one parameter."""
        if not self.unpenalized:
            return self
        return replace(self, unpenalized={}, always=self.unpenalized.get(name, ()))

    def line(self) -> LinearTerm | None:
        """Return decay theta - lam w_i, unless there is a smoothed norm."""
        return None if self._smooth(self.gamma) else LinearTerm(self.decay, (-self.lam,))

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr (decay theta - lam w_i + gamma tanh(theta / rho))."""
        smooth = self._sign(w) if self._smooth(self.gamma) else None
        if self.decay:
            w.mul_(1 - lr * self.decay)
        w.add_(aux[0], alpha=lr * self.lam)
        if smooth is not None:
            w.sub_(smooth, alpha=lr * self.gamma)

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Shrink theta if proximal, then update the anchor."""
        self.shrink_(w, lr)
        self.follow_(aux[0], w)

    def slope(self, w: Tensor, anchor: Tensor) -> Tensor:
        """Return the term that `before_` subtracts, divided by lr."""
        gradient = self.decay * w - self.lam * anchor
        return gradient + self.gamma * self._sign(w) if self._smooth(self.gamma) else gradient

    def shrink_(self, w: Tensor, lr: float) -> None:
        """Take the proximal step of gamma |theta|_1."""
        if self.proximal and self.gamma:
            self._soften_(w, lr * self.gamma)

    def follow_(self, anchor: Tensor, w: Tensor) -> None:
        """Move the anchor by eta (lam (w_i - theta) + gamma_w tanh(w_i / rho)), or its prox."""
        smooth = self._sign(anchor) if self._smooth(self.gamma_w) else None
        move_towards_(anchor, w, self.rate * self.lam)
        if smooth is not None:
            anchor.sub_(smooth, alpha=self.rate * self.gamma_w)
        elif self.gamma_w:
            self._soften_(anchor, self.rate * self.gamma_w)

    def _smooth(self, strength: float) -> bool:
        return strength > 0 and not self.proximal

    def _sign(self, w: Tensor) -> Tensor:
        sign = smooth_sign(w, self.rho)
        return sign.mul_(~marked(self.always, w.shape[-1])) if self.always else sign

    def _soften_(self, w: Tensor, shrink: float) -> None:
        if self.always:
            w.sub_(w.clamp(-shrink, shrink).mul_(~marked(self.always, w.shape[-1])))
        else:
            soften_(w, shrink)


@final
@dataclass(frozen=True)
class FixedAnchor(Rule):
    """The same steps of theta with a fixed anchor."""

    coupling: Coupled

    def of(self, name: str) -> FixedAnchor:
        """Return the same with the coupling of one parameter."""
        return FixedAnchor(self.coupling.of(name))

    def line(self) -> LinearTerm | None:
        """Return the line of the coupling."""
        return self.coupling.line()

    def before_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Subtract lr times the gradient of the coupling."""
        self.coupling.before_(w, aux, lr)

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:  # noqa: ARG002 - a rule's signature
        """Shrink theta if proximal."""
        self.coupling.shrink_(w, lr)


def smooth_sign(x: Tensor, rho: float) -> Tensor:
    """Return tanh(x / rho), the derivative of rho log cosh(x / rho).

    It is computed as 2 sigmoid(2 x / rho) - 1, which is six times as fast as torch's tanh on CPUs.
    The absolute error is that of numbers near 1, even where tanh is close to 0; 0 stays 0.

    >>> smooth_sign(torch.tensor([-1.0, 0.0, 1.0]), 0.01)
    tensor([-1.,  0.,  1.])
    """
    return (x * (2 / rho)).sigmoid_().mul_(2.0).sub_(1.0)


def alternate(
    problem: Problem,
    start: Params,
    batches: Batches,
    config: SgdConfig,
    *,
    rule: Coupled,
    inner: int = 1,
    accuracy: float = 0.0,
) -> tuple[Params, Params]:
    """Return the personal model and its anchor after one outer step for each batch.

    Parameters
    ----------
    start
        Where both models start.
    config
        As in `sgd`; momentum is used with a single inner step only.
    inner, accuracy
        Theta takes at most `inner` steps on each mini-batch, and none once the squared norm of
        the gradient of its subproblem is at most `accuracy` (nu in the paper).
    """
    if inner == 1 and not accuracy:
        theta, (anchor,) = sgd_pair(problem, start, batches, config, rule=rule, aux=(start,))
        return theta, anchor
    nested = _Nested(problem, rule, replace(config, momentum=0.0), inner, accuracy)
    theta, anchor = dict(start), dict(start)
    for step in range(len(batches)):
        if accuracy:
            theta = nested.solve(theta, anchor, batches.batch(step))
        else:
            theta = nested.descend(theta, anchor, batches, step)
        anchor = nested.follow(anchor, theta, batches.active[step])
    return theta, anchor


@dataclass(frozen=True)
class _Nested:
    """Several inner steps on the same mini-batch."""

    problem: Problem
    rule: Coupled
    config: SgdConfig
    inner: int
    accuracy: float

    def descend(self, theta: Params, anchor: Params, batches: Batches, step: int) -> Params:
        """Take `inner` steps on the rows of one mini-batch."""
        repeated = replace(
            batches,
            index=batches.index[step].expand(self.inner, -1),
            weight=batches.weight[step].expand(self.inner, -1),
            active=batches.active[step].expand(self.inner),
            key=keys.fold(batches.key, step),
        )
        rule = FixedAnchor(self.rule)
        return sgd(self.problem, theta, repeated, self.config, rule=rule, aux=(anchor,))

    def solve(self, theta: Params, anchor: Params, batch: Batch) -> Params:
        """Take steps until the subproblem is solved; solved clients are masked."""
        moving = batch.active
        for _ in range(self.inner):
            fit = gradient(self.problem, theta, batch)
            total = {
                name: self._slope(name, fit[name], w, anchor[name]) for name, w in theta.items()
            }
            moved = {name: self._moved(name, w, total[name]) for name, w in theta.items()}
            moving = moving & (self._residual(theta, total, moved) > self.accuracy)
            theta = tree.where(moving, moved, theta)
        return theta

    def follow(self, anchor: Params, theta: Params, active: Tensor) -> Params:
        """Update the anchor once."""
        moved = {}
        for name, w in theta.items():
            # a new tensor: the anchor may still be shared by all clients of a batch
            moved[name] = torch.zeros_like(w).add_(anchor[name])
            self.rule.of(name).follow_(moved[name], w)
        return tree.where(active, moved, anchor)

    def _slope(self, name: str, gradient: Tensor, w: Tensor, anchor: Tensor) -> Tensor:
        return gradient + self.config.weight_decay * w + self.rule.of(name).slope(w, anchor)

    def _moved(self, name: str, w: Tensor, gradient: Tensor) -> Tensor:
        moved = w - self.config.lr * gradient
        self.rule.of(name).shrink_(moved, self.config.lr)
        return moved

    def _residual(self, theta: Params, gradient: Params, moved: Params) -> Tensor:
        """Return |grad H|^2, or with the proximal step the squared gradient mapping."""
        if self.rule.proximal:
            gradient = tree.scale(1 / self.config.lr, tree.subtract(theta, moved))
        return tree.dot(gradient, gradient)


def sparsify(
    params: Params,
    threshold: float,
    floor: float,
    always: Mapping[str, tuple[int, ...]] | None = None,
) -> Params:
    """Zero every entry below `threshold`, but keep the largest fraction `floor` of all entries.

    Entries in `always` (positions along the last axis, by parameter) are kept and not counted.
    NaN values are kept, so that divergence remains visible.

    >>> sparsify({"w": torch.tensor([3.0, -0.2, 0.1, 0.0])}, threshold=1.0, floor=0.5)
    {'w': tensor([ 3.0000, -0.2000,  0.0000,  0.0000])}
    """
    if not threshold:
        return params
    always = always or {}
    exempt = {name: marked(positions, params[name].shape[-1]) for name, positions in always.items()}
    cut: float | Tensor = threshold
    sizes = torch.cat(
        [
            (leaf[..., (~exempt[name]).nonzero()[:, 0]] if name in exempt else leaf)
            .abs()
            .reshape(-1)
            for name, leaf in params.items()
        ]
    )
    n_kept = math.ceil(floor * len(sizes))
    if n_kept:
        smallest_kept = sizes.kthvalue(len(sizes) - n_kept + 1).values
        cut = smallest_kept.clamp(max=threshold)
    pruned = {}
    for name, leaf in params.items():
        small = leaf.abs() < cut
        if name in exempt:
            small = small & ~exempt[name]
        # where, not a product: a negative number times zero would be -0
        pruned[name] = torch.where(small, torch.zeros_like(leaf), leaf)
    return pruned


def density(params: Params) -> Tensor:
    """Return the fraction of entries that are not zero."""
    count = torch.stack([(leaf != 0).sum() for leaf in params.values()]).sum()
    some = next(iter(params.values()))
    return count.to(some.dtype) / sum(leaf.numel() for leaf in params.values())
