"""What each row adds to the sums of a request: the block for the ledger, and the size of noise."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from parsifl.core.batching import Rows
from parsifl.core.problem import CurvatureSums
from parsifl.data.clients import ClientData
from parsifl.data.table_encoding import Array
from parsifl.sites.families.cox import Cox, cox_losses


@final
@dataclass(frozen=True, eq=False)
class RowTerms:
    """The vectors of a request with one entry per row.

    From the gradient X'r and the products X'V of a request, a server obtains X't for every t in
    the span of r and of columns of V: the weights times the columns, w x_j, or K x_j for the
    curvature X'KX of a Cox model, in which rows are combined.

    Attributes
    ----------
    design
        [rows, d]: the columns, and 1 for an intercept.
    residuals
        [rows]: r.
    products
        [rows, d]: V.
    losses
        [rows]: the loss of each row.
    weighted
        Whether V is made of weights, which are then its last column.
    """

    design: Array
    residuals: Array
    products: Array
    losses: Array
    weighted: bool

    @classmethod
    def of(cls, problem: Any, data: ClientData, at: torch.Tensor) -> RowTerms:
        """Return the terms of the rows at some coefficients."""
        x = np.asarray(data.x)
        if isinstance(problem, Cox):
            u = problem.predict({problem.name: at}, data.x).requires_grad_()
            time, event, weight = data.y.unbind(1)
            losses = cox_losses(u, time, event, weight)
            (derivative,) = torch.autograd.grad((weight * losses).sum(), u)
            risks = RiskSetProducts(u.detach().numpy(), time=time.numpy(), event=event.numpy())
            return cls(
                x, derivative.numpy(), risks.times(x), losses.detach().numpy(), weighted=False
            )
        u, y = problem.predict({problem.name: at}, data.x), data.y[:, 0]
        u = u + data.y[:, -1] if problem.offset else u
        design = np.column_stack([x, np.ones(len(x))]) if problem.intercept else x
        weights, fit = problem.datafit.curvature(u).numpy(), problem.datafit
        products = weights[:, None] * design
        residuals, losses = fit.slope(u, y).numpy(), fit.loss(u, y).numpy()
        return cls(design, residuals, products, losses, weighted=problem.intercept)

    def block(
        self, columns: Sequence[int], names: Sequence[str], *, diagonal: bool
    ) -> dict[str, Array]:
        """Return the block of a request for products with some columns, by name.

        The diagonal of a 0/1 column is a combination of the products of the weights with it and
        with a constant.
        """
        asked = {*columns}
        if self.weighted and (diagonal or asked):
            asked.add(self.design.shape[1] - 1)
        vectors = {
            f"products with {names[position]}": self.products[:, position] for position in asked
        }
        return {**vectors, "residuals": self.residuals}

    def noisy(
        self, sums: CurvatureSums, columns: Sequence[int], width: float, secret: bytes, request: str
    ) -> CurvatureSums:
        """Return sums with uniform noise of this width, relative to the largest possible term.

        The noise depends on the secret of the site and on the request, so that the same question
        has the same answer. Its size is rounded up to a power of two. A diagonal that is not sent
        remains 0.
        """
        far, residual = np.abs(self.design).max(axis=0), np.abs(self.residuals).max()
        products = np.abs(self.products).max(axis=0)
        sizes = {
            "loss": np.abs(self.losses).max(),
            "gradient": residual * far,
            "diagonal": products * far if bool(sums.diagonal.any()) else 0 * far,
            "curvature": np.outer(products[list(columns)], far).ravel(),
        }
        values = {
            name: getattr(sums, name)
            + torch.from_numpy(keyed_noise(secret, f"{request} {name}", np.asarray(size), width))
            for name, size in sizes.items()
        }
        return replace(sums, **values)


def keyed_noise(secret: bytes, request: str, sizes: Array, width: float) -> Array:
    """Return uniform noise of a width relative to sizes, a function of secret and request.

    >>> noise = keyed_noise(b"secret", "question", np.array([3.0, 0.0]), 0.5)
    >>> bool(abs(noise[0]) <= 1.0), float(noise[1])
    (True, 0.0)
    >>> bool((noise == keyed_noise(b"secret", "question", np.array([3.0, 0.0]), 0.5)).all())
    True
    """
    name = hashlib.blake2b(request.encode(), key=secret).digest()
    stream = hashlib.shake_256(name).digest(8 * sizes.size)
    uniform = np.frombuffer(stream, "<u8").reshape(sizes.shape) * 2.0**-64 - 0.5
    rounded = np.exp2(np.ceil(np.log2(np.where(sizes > 0, sizes, 1.0))))
    noise: Array = np.where(sizes > 0, width * rounded * uniform, 0.0)
    return noise


def all_rows(data: ClientData) -> Rows:
    """Return the rows of a client, each with a weight of 1."""
    return Rows(data.x, data.y, torch.ones(len(data.y), dtype=torch.float64))


class RiskSetProducts:
    """The matrix K of the curvature X'KX of a Cox model with Breslow's ties.

    With hazard ratios r, K_ij = -r_i r_j C(min(t_i, t_j)) off the diagonal, where C(t) adds up
    d / S^2 over the events until t, and S the ratios at risk; rows of K add up to 0. With rows in
    the order of time, an entry above the diagonal is a product, -early_i late_j.

    Parameters
    ----------
    log_ratios
        The logarithm of each row's hazard ratio.
    """

    def __init__(self, log_ratios: Array, *, time: Array, event: Array) -> None:
        ratio = np.exp(log_ratios - log_ratios.max())
        moments, moment_of_row = np.unique(time, return_inverse=True)
        events = np.bincount(moment_of_row, event, len(moments))
        at_risk = np.cumsum(np.bincount(moment_of_row, ratio, len(moments))[::-1])[::-1]
        per_set = np.where(events > 0, 1 / np.maximum(at_risk, np.finfo(float).tiny), 0.0)
        self.order = order = np.argsort(moment_of_row, kind="stable")
        squares = np.cumsum(events * per_set * per_set)[moment_of_row]
        self.late = ratio[order]
        self.early = (ratio * squares)[order]
        self.diagonal = (ratio * (np.cumsum(events * per_set)[moment_of_row] - ratio * squares))[
            order
        ]

    def times(self, x: Array) -> Array:
        """Return K x for the columns of x [rows, columns], in time proportional to the rows."""
        # K times a constant is 0; from the first row, because constant columns are then exactly 0
        centered = x - x[0]
        centered = (centered - centered.mean(axis=0))[self.order]
        early, late, diagonal = (part[:, None] for part in (self.early, self.late, self.diagonal))
        before = _after((early * centered)[::-1])[::-1]
        product = diagonal * centered - early * _after(late * centered) - late * before
        by_row: Array = np.empty_like(product)
        by_row[self.order] = product
        return by_row


def _after(values: Array) -> Array:
    """Return the sum of the values after each value, along the first axis.

    >>> _after(np.array([1.0, 2.0, 3.0]))
    array([5., 3., 0.])
    """
    later: Array = np.cumsum(values[:0:-1], axis=0)[::-1]
    return np.concatenate([later, np.zeros_like(values[:1])])
