"""Minimising a loss over a support: exactly, or by one of several inner solvers.

All of them start at the current coefficients and run under `torch.func.vmap`. The iterative ones
stop moving once a step would be shorter than `delta`; under vmap a client that has stopped waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parsifl import keys
from parsifl.problem import Restricted
from parsifl.solvers.least_squares import least_squares

_NEWTON_STEPS = 25
_HALVINGS = 8
_JITTER = 1e-13


def predictor(part: Restricted, z: Tensor) -> Tensor:
    """Return u: [n], or [n, classes]."""
    u = (part.columns @ z[..., None])[..., 0]
    return u if z.ndim == 1 else u.mT


def loss(part: Restricted, z: Tensor) -> Tensor:
    """Return the loss at z."""
    fit = (part.weight * part.loss(predictor(part, z), part.targets)).sum()
    return fit + (part.ridge * z.square()).sum() / 2


def gradient(part: Restricted, z: Tensor) -> Tensor:
    """Return the gradient at z."""
    slope = part.slope(predictor(part, z), part.targets)
    if z.ndim == 1:
        return part.columns.mT @ (part.weight * slope) + part.ridge * z
    weighted = (part.weight[:, None] * slope).mT
    return (part.columns.mT @ weighted[..., None])[..., 0] + part.ridge * z


def hessian(part: Restricted, z: Tensor) -> Tensor:
    """Return the Hessian at z as a matrix over all coefficients, classes one after the other."""
    curvature = part.curvature(predictor(part, z))
    if z.ndim == 1:
        inner = part.columns.mT @ (part.columns * (part.weight * curvature)[:, None])
    else:
        weighted = curvature * part.weight[:, None, None]
        inner = torch.einsum("nab,ank,bnl->akbl", weighted, part.columns, part.columns)
        inner = inner.reshape(z.numel(), z.numel())
    return inner + torch.diag(part.ridge.reshape(-1))


def minimize(part: Restricted) -> Tensor:
    """Return the exact minimiser: least squares, or Newton to convergence."""
    return least_squares(part) if part.scale is not None else newton(part)


def newton(part: Restricted, delta: float = 0.0, steps: int = _NEWTON_STEPS) -> Tensor:
    """Take Newton steps, each cut to the best of a few halvings.

    Where the loss has no minimiser on the support (separable classes without l2), the steps end
    at a finite point of small loss.
    """
    fractions = [0.5**power for power in range(_HALVINGS)] + [0.0]

    def move(z: Tensor, _: int) -> Tensor:
        slope = gradient(part, z).reshape(-1)
        curve = hessian(part, z)
        jitter = _JITTER * (curve.diagonal().sum() + 1e-300)
        system = curve + torch.diag(jitter + (curve.diagonal() == 0).to(curve.dtype))
        step = torch.linalg.solve(system, slope).reshape(z.shape)
        losses = torch.stack([loss(part, z - fraction * step) for fraction in fractions])
        best = losses.nan_to_num(nan=torch.inf).argmin()
        return -torch.tensor(fractions, dtype=z.dtype)[best] * step

    return _walk(part.start, move, delta, steps)


def gradient_descent(part: Restricted, delta: float = 0.0, steps: int = 50) -> Tensor:
    """Take gradient steps of length 1 / L, L being the largest curvature on the support."""
    rate = 1 / smoothness(part)
    return _walk(part.start, lambda z, _: -rate * gradient(part, z), delta, steps)


def stochastic_gradient(
    part: Restricted, key: Tensor, batch: int, lr: float, steps: int = 50
) -> Tensor:
    """Take SGD steps on rows that are drawn by key, with replacement."""

    def move(z: Tensor, step: int) -> Tensor:
        return -lr * gradient(_sample(part, key, batch, step), z)

    return _walk(part.start, move, 0.0, steps)


def svrg(
    part: Restricted, key: Tensor, batch: int, delta: float = 0.0, steps: int = 50, every: int = 10
) -> Tensor:
    """Take variance-reduced steps of length 1 / (4 L); the full gradient is renewed `every` so many."""
    rate = 0.25 / row_smoothness(part)
    z = part.start
    for start in range(0, steps, every):
        anchor, full = z, gradient(part, z)

        def move(
            z: Tensor, step: int, anchor: Tensor = anchor, full: Tensor = full, start: int = start
        ) -> Tensor:
            some = _sample(part, key, batch, start + step)
            return -rate * (gradient(some, z) - gradient(some, anchor) + full)

        z = _walk(z, move, delta, min(every, steps - start))
    return z


def smoothness(part: Restricted) -> Tensor:
    """Return the largest curvature on the support (of the smaller of two Gram matrices)."""
    root = part.columns * part.weight.sqrt()[:, None]
    tall = root.shape[-2] > root.shape[-1]
    gram = root.mT @ root if tall else root @ root.mT
    largest = torch.linalg.eigvalsh(gram)[..., -1].max()
    return _bound(part) * largest + part.ridge.max() + torch.finfo(root.dtype).tiny


def row_smoothness(part: Restricted) -> Tensor:
    """Return the largest curvature that a single row can have."""
    squares = part.columns.square().sum(-1)
    used = (part.weight > 0).to(squares.dtype)
    return (
        _bound(part) * (squares * used).max() + part.ridge.max() + torch.finfo(squares.dtype).tiny
    )


def _bound(part: Restricted) -> float:
    # the curvature of the logistic and of the softmax loss is at most 1/4 and 1/2
    if part.scale is not None:
        return part.scale
    return 0.25 if part.columns.ndim == 2 else 0.5


def _sample(part: Restricted, key: Tensor, batch: int, step: int) -> Restricted:
    """Draw rows with replacement; their weights are those of a mean that is right on average."""
    total = part.weight.shape[0]
    draws = keys.uniform(key, (batch,), salt=step)
    rows = (draws * total).to(torch.long).clamp(max=total - 1)
    weight = part.weight[rows] * (total / batch)
    return replace(
        part, columns=part.columns[..., rows, :], targets=part.targets[rows], weight=weight
    )


def _walk(z: Tensor, move: Callable[[Tensor, int], Tensor], delta: float, steps: int) -> Tensor:
    going = torch.ones_like(z.sum(), dtype=torch.bool)
    for step in range(steps):
        change = move(z, step)
        going = going & (change.norm() > delta)
        z = torch.where(going, z + change, z)
    return z
