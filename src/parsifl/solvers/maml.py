"""Model-agnostic meta-learning: the gradient is taken after an adaptation step."""

from __future__ import annotations

import torch

from parsifl.core import keys, tree
from parsifl.core.batching import Batch, Batches
from parsifl.core.problem import Params, Problem
from parsifl.solvers import fused
from parsifl.solvers.sgd import SgdConfig, gradient, owned


def first_order_maml(
    problem: Problem, params: Params, batches: Batches, config: SgdConfig, *, inner_lr: float
) -> Params:
    """Return the parameters after w <- w - lr g(w - inner_lr g(w; D); D') for each batch.

    D is the first and D' the second half of the rows of a batch; weight decay is part of g.
    Momentum is not used.
    """
    if len(batches) == 0:
        return dict(params)
    network = fused.network_for(problem, batches)
    if network is not None:
        steps = fused.MamlSteps(network, config, inner_lr, tuple(params))
        return fused.run_maml(steps, params, batches)
    moving, lr, decay = owned(params, batches), config.lr, config.weight_decay
    for batch in batches:
        point = shifted(moving, -inner_lr, slope(problem, moving, part(batch, 0, 2), decay))
        step_(moving, slope(problem, point, part(batch, 1, 2), decay), lr, batch, batches.ragged)
    return moving


def slope(problem: Problem, params: Params, batch: Batch, decay: float) -> Params:
    """Return the gradient of the loss with weight decay."""
    gradients = gradient(problem, params, batch)
    return shifted(gradients, decay, params) if decay else gradients


def shifted(params: Params, factor: float, direction: Params) -> Params:
    """Return params + factor * direction, without an intermediate copy."""
    return tree.map(lambda w, d: torch.add(w, d, alpha=factor), params, direction)


def step_(params: Params, direction: Params, lr: float, batch: Batch, ragged: bool) -> None:
    """Update in place, except clients without remaining steps."""
    for name, w in params.items():
        moved = direction[name] * batch.active if ragged else direction[name]
        w.sub_(moved, alpha=lr)


def part(batch: Batch, number: int, count: int) -> Batch:
    """Return one of `count` equal parts of the rows, with its own key."""
    size = len(batch.y) // count
    rows = slice(number * size, (number + 1) * size)
    key = keys.fold(batch.key, number)
    return Batch(batch.x[rows], batch.y[rows], batch.weight[rows], batch.active, key)
