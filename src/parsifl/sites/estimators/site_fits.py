"""What each site computes once, on its rows, at the solution: its own fit, and sums for errors.

A site fits the columns of the model with its own intercept (and residual variance), starting from
the common coefficients. It sends the estimate and the sums that robust and clustered errors need;
none of them is larger than the information matrix of these columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from parsifl.core.batching import Rows
from parsifl.linear.design import CsrDesign
from parsifl.linear.sums import best_intercept
from parsifl.sites.estimators.moments import Array, Indices
from parsifl.sites.families.cox import Cox, cox_terms

Intercept = Literal["none", "shared", "own"]
"""Whether a model has no intercept, one for all sites, or one for each site."""
_STEPS, _HALVINGS = 60, 30
_MINIMAL = 1e-14
_LOST = 1e-7
"""The fraction of the curvature below which the likelihood of a site has no maximum."""


@dataclass(frozen=True, eq=False)
class Terms:
    """Sums over the rows of a site at some coefficients.

    `outer` is the sum over rows of the products of their scores; `pearson` that of the squared
    residuals over their variances.
    """

    loss: float
    gradient: Array
    information: Array
    outer: Array
    pearson: float

    def without_last(self) -> Terms:
        """Return the derivatives of the loss minimized over the last coefficient, an intercept."""
        pivot = self.information[-1, -1]
        ratio = self.information[-1] / pivot if pivot > 0 else np.zeros(len(self.gradient))
        reduce = np.eye(len(self.gradient))[:-1]
        reduce[:, -1] = -ratio[:-1]
        return Terms(
            self.loss,
            reduce @ self.gradient,
            reduce @ self.information @ reduce.T,
            reduce @ self.outer @ reduce.T,
            self.pearson,
        )


@dataclass(frozen=True, eq=False)
class SiteFits:
    """The answers of all sites; the last coefficient is the intercept, if there is a shared one.

    Attributes
    ----------
    counts
        The number of rows with a weight, by site.
    gradients, information, outer, pearson
        Sums at the common coefficients: [sites, c], [sites, c, c], [sites, c, c] and [sites]. See
        `Terms`; `outer` is empty where sites sent no such sums.
    estimates
        The fit of each site with its own intercept [sites, c]; NaN if it has none.
    site_losses, site_information, site_outer
        Sums at these estimates.
    intercept
        The kind of intercept.
    """

    counts: Array
    gradients: Array
    information: Array
    outer: Array
    pearson: Array
    estimates: Array
    site_losses: Array
    site_information: Array
    site_outer: Array
    intercept: Intercept

    @property
    def bytes_up(self) -> int:
        """The size of the messages, without headers."""
        sites, c = self.estimates.shape
        return int(8 * sites * (2 * c + 4 * c * (c + 1) // 2 + 3))

    @classmethod
    def of(
        cls, answers: list[tuple[Terms, Array, Terms]], counts: Any, kind: Intercept
    ) -> SiteFits:
        """Stack the answers of sites."""
        common, estimates, last = zip(*answers, strict=True)
        return cls(
            counts=np.array(counts, dtype=np.float64),
            gradients=np.stack([terms.gradient for terms in common]),
            information=np.stack([terms.information for terms in common]),
            outer=np.stack([terms.outer for terms in common]),
            pearson=np.array([terms.pearson for terms in common]),
            estimates=np.stack(estimates),
            site_losses=np.array([terms.loss for terms in last]),
            site_information=np.stack([terms.information for terms in last]),
            site_outer=np.stack([terms.outer for terms in last]),
            intercept=kind,
        )


def site_fits(
    problem: Any, rows: tuple[Rows, ...], coefficients: Array, columns: Indices, kind: Intercept
) -> SiteFits:
    """Fit the columns at every site, starting from the common coefficients."""
    column_numbers = columns[columns < problem.features]
    start = coefficients[column_numbers]
    if kind != "none":
        shared = float(coefficients[-1]) if problem.intercept and kind == "shared" else 0.0
        start = np.append(start, shared)
    answers, counts = [], []
    for site in rows:
        terms = _terms_at(problem, site, column_numbers, kind)
        first = start.copy()
        if kind == "own":
            first[-1] = _own_level(problem, site, column_numbers, start)
        answers.append(_answer(terms, first, has_level=kind == "own"))
        counts.append(int((site.y[:, getattr(problem, "weight_column", 1)] > 0).sum()))
    return SiteFits.of(answers, counts, kind)


def _answer(
    terms: Callable[[Array], Terms], first: Array, *, has_level: bool
) -> tuple[Terms, Array, Terms]:
    common = terms(first)
    estimate, last = fitted(terms, first)
    if has_level:
        common, estimate, last = common.without_last(), estimate[:-1], last.without_last()
    return common, estimate, last


def fitted(terms: Callable[[Array], Terms], first: Array) -> tuple[Array, Terms]:
    """Minimize the loss of a site by damped Newton steps; NaN if it has no minimum."""
    at, now = first, terms(first)
    start = np.diag(now.information)
    ended = False
    for _ in range(_STEPS):
        direction = np.linalg.lstsq(now.information, now.gradient, rcond=1e-12)[0]
        decrement = float(now.gradient @ direction)
        ended = decrement <= _MINIMAL * (1 + abs(now.loss))
        step = 1.0
        for _ in range(_HALVINGS):
            trial = terms(at - step * direction)
            if ended or trial.loss <= now.loss - 1e-4 * step * decrement:
                break
            step /= 2
        at, now = at - step * direction, trial
        if ended:  # with one step more than the decrement asks for: it is quadratic
            break
    lost = (np.diag(now.information) <= _LOST * start) & (start > 0)
    if not ended or lost.any() or not np.isfinite(at).all():
        at = np.full(len(at), np.nan)
    return at, now


def _terms_at(
    problem: Any, rows: Rows, column_numbers: Indices, kind: Intercept
) -> Callable[[Array], Terms]:
    index = torch.from_numpy(column_numbers)
    x = rows.x.columns(index) if isinstance(rows.x, CsrDesign) else rows.x[:, index]
    if isinstance(problem, Cox):
        time, event, weight = problem.targets(rows)
        return lambda b: Terms(*cox_terms(x, time, event, weight, b, problem.ties), float("nan"))
    if kind != "none":
        x = torch.cat([x, torch.ones_like(rows.y[:, :1])], dim=1)
    y, weight = rows.y[:, 0], rows.y[:, 1]
    offset = rows.y[:, 2] if problem.offset else torch.zeros_like(y)

    def terms(b: Array) -> Terms:
        u = x @ torch.from_numpy(b) + offset
        derivative, second = problem.datafit.slope(u, y), problem.datafit.curvature(u)
        scores = x * (weight * derivative)[:, None]
        information = x.mT @ (x * (weight * second)[:, None])
        pearson = weight * derivative.square() / second.clamp(min=1e-300)
        loss = (weight * problem.datafit.loss(u, y)).sum()
        return Terms(
            float(loss),
            scores.sum(0).numpy(),
            information.numpy(),
            (scores.mT @ scores).numpy(),
            float(pearson.sum()),
        )

    return terms


def _own_level(problem: Any, rows: Rows, column_numbers: Indices, start: Array) -> float:
    index = torch.from_numpy(column_numbers)
    x = rows.x.columns(index) if isinstance(rows.x, CsrDesign) else rows.x[:, index]
    u = x @ torch.from_numpy(start[:-1])
    u = u + rows.y[:, 2] if problem.offset else u
    return float(best_intercept(problem.datafit, u, rows.y[:, 0], rows.y[:, 1]))
