"""Sums over a client's rows for a lossless fit, with its own intercept profiled out.

At coefficients b a client returns its loss, the gradient and the diagonal of the Hessian over all
columns, and the Hessian on some candidates. Sums over clients are those of the pooled rows. A
parameter that belongs to the client (an intercept a) is optimized for b at the client. The
derivatives of the profiled loss follow from a Schur complement,

    g <- g_b,    H <- H_bb - h_ba h_aa^-1 h_ab,

so such a parameter never leaves the client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parsifl.core.problem import CurvatureSums
from parsifl.linear import design
from parsifl.linear.datafits import Datafit
from parsifl.linear.design import CsrDesign, Design

_NEWTON_STEPS = 40
_FURTHEST = 30.0
"""Bound of an intercept that would diverge: a site of one class, or without an event."""


def glm_sums(
    datafit: Datafit,
    x: Design,
    y: Tensor,
    weight: Tensor,
    coefficients: Tensor,
    candidates: Tensor,
    *,
    intercept: bool,
    own_intercept: bool = False,
    offset: Tensor | None = None,
) -> CurvatureSums:
    """Return the sums of a generalised linear model; an intercept is the last coefficient.

    An `offset` is added to the predictor of each row.

    >>> from parsifl.linear.datafits import SQUARED_HALF
    >>> one, b = torch.ones(2), torch.zeros(1)
    >>> sums = glm_sums(SQUARED_HALF, torch.eye(2)[:, :1], one, one, b, torch.tensor([0]),
    ...                 intercept=False)
    >>> sums.loss, sums.gradient, sums.curvature
    (tensor(1.), tensor([-1.]), tensor([1.]))
    """
    u = design.matvec(x, coefficients[:-1] if intercept else coefficients)
    u = u if offset is None else u + offset
    if own_intercept:
        u = u + best_intercept(datafit, u, y, weight)
    elif intercept:
        u = u + coefficients[-1]
    derivative, curvature_weight = weight * datafit.slope(u, y), weight * datafit.curvature(u)
    gradient, diagonal = design.rmatvec(x, derivative), _square_sums(x, curvature_weight)
    columns = _columns(x, candidates, intercept)
    curvature = columns.mT @ (columns * curvature_weight[:, None])
    if intercept:
        gradient = torch.cat([gradient, derivative.sum()[None]])
        diagonal = torch.cat([diagonal, curvature_weight.sum()[None]])
    if own_intercept:
        total = curvature_weight.sum().clamp(min=torch.finfo(curvature_weight.dtype).tiny)
        cross = torch.cat([design.rmatvec(x, curvature_weight), curvature_weight.sum()[None]])
        diagonal = (diagonal - cross * cross / total).clamp(min=0)
        shared = columns.mT @ curvature_weight
        curvature = curvature - shared[:, None] * shared / total
        inner = torch.ones_like(gradient)
        inner[-1] = 0.0
        gradient, diagonal = gradient * inner, diagonal * inner
    loss = (weight * datafit.loss(u, y)).sum()
    return CurvatureSums(weight.sum(), loss, gradient, diagonal, upper(curvature))


def best_intercept(datafit: Datafit, u: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the intercept that, added to the predictor u, minimises the loss of these rows."""
    total = weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
    if datafit.quadratic:
        return (weight * (y - u)).sum() / total
    if datafit.name == "poisson":
        shift = u.max()
        level = (weight * torch.exp(u - shift)).sum() / total
        events = (weight * y).sum() / total
        low = u.new_tensor(_FURTHEST).neg().exp()
        return (torch.log(torch.maximum(events, low) / level) - shift).clamp(-_FURTHEST, _FURTHEST)
    intercept = u.new_zeros(())
    steps = 1 if u.is_meta else _NEWTON_STEPS  # for its shape one suffices
    for _ in range(steps):  # a fixed number: many sites may run at once
        derivative = (weight * datafit.slope(u + intercept, y)).sum() / total
        second = (weight * datafit.curvature(u + intercept)).sum() / total
        step = (derivative / second.clamp(min=1e-12)).clamp(-2.0, 2.0)
        intercept = (intercept - step).clamp(-_FURTHEST, _FURTHEST)
    return intercept


def upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix, row by row.

    >>> upper(torch.tensor([[1, 2], [2, 3]]))
    tensor([1, 2, 3])
    """
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column]


def _square_sums(x: Design, weight: Tensor) -> Tensor:
    if isinstance(x, CsrDesign):
        return CsrDesign(x.matrix.multiply(x.matrix).tocsr()).adjoint(weight)
    return weight @ x.reshape(len(x), -1).square()


def _columns(x: Design, index: Tensor, intercept: bool) -> Tensor:
    width = x.shape[1] if isinstance(x, CsrDesign) else x.reshape(len(x), -1).shape[1]
    inner = index.clamp(max=width - 1) if intercept else index
    columns = x.columns(inner) if isinstance(x, CsrDesign) else x.reshape(len(x), -1)[:, inner]
    if not intercept:
        return columns
    return torch.where(index == width, torch.ones_like(columns), columns)
