"""A whole path on sites left out, from the sums that each site sends once for a squared loss.

A site's count, sums and products determine every model without it and the squared error of such a
model on its rows. They are what the last fit needs anyway, so the path costs no further message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import clone

from parsifl.algorithms.fedbestsubset import FedBestSubset
from parsifl.core.keys import Key
from parsifl.data.tables import is_table
from parsifl.estimators.moments import Array, Indices
from parsifl.estimators.preprocessor import owners
from parsifl.estimators.regressor import FederatedSparseRegressor
from parsifl.linear.glm import GLM
from parsifl.solvers import best_subset, subset_state
from parsifl.solvers.subset_state import Sums


@dataclass(frozen=True, eq=False)
class Products:
    """Count, sums and products of the columns and the target (the last) of some sites."""

    count: float
    sums: Array
    products: Array

    @classmethod
    def of(cls, rows: Array, weight: Array) -> Products:
        """Sum up rows."""
        return cls(float(weight.sum()), weight @ rows, rows.T @ (rows * weight[:, None]))

    @classmethod
    def from_zero(
        cls, loss: float, gradient: Array, curvature: Array, sums: Array, count: float
    ) -> Products:
        """Read them from half the sum of squares and its derivatives at coefficients of 0."""
        cross = -gradient[:, None]
        products = np.block([[curvature, cross], [cross.T, np.array([[2 * loss]])]])
        return cls(count, sums, products)

    @classmethod
    def total(cls, parts: Sequence[Products]) -> Products:
        """Add up sites."""
        return cls(
            sum(part.count for part in parts),
            np.sum([part.sums for part in parts], axis=0),
            np.sum([part.products for part in parts], axis=0),
        )

    def answer(self, slopes: Array, columns: Indices) -> tuple[float, Array, Array]:
        """Return half the sum of squares and its derivatives at these columns; no intercept."""
        b = np.append(slopes, -1.0)
        residual = self.products @ b
        inner = self.products[np.ix_(columns, columns)]
        return float(b @ residual / 2), residual[columns], inner

    def error(self, slopes: Array, intercept: float) -> float:
        """Return the mean squared error of a model on these rows."""
        b = np.append(-slopes, 1.0)  # y - x'b
        square = b @ self.products @ b - 2 * intercept * (b @ self.sums)
        return float(square / self.count + intercept**2)


def held_out_errors(
    base: FederatedSparseRegressor,
    sites: Sequence[Products],
    path: Indices,
    held: Sequence[Indices],
) -> Array:
    """Return mean squared errors [numbers, folds] on the sites `held` out of each fold."""
    found = np.empty((len(path), len(held)))
    for j, out in enumerate(held):
        train = Products.total([part for site, part in enumerate(sites) if site not in out])
        test = Products.total([sites[site] for site in out])
        for i, number in enumerate(path):
            found[i, j] = test.error(*_model(base, train, int(number)))
    return found


def mean_errors(errors: Array, held: Array) -> tuple[Array, Array]:
    """Return the mean over folds, each weighted by the rows that it holds out, and its error.

    A fold without an error (NaN) is left out.
    """
    weight = np.where(np.isfinite(errors), held, 0.0)
    if not (weight.sum(axis=1) > 0).all():
        raise ValueError("no fold has an error for every number; take fewer folds")
    total = weight.sum(axis=1, keepdims=True)
    values = np.where(np.isfinite(errors), errors, 0.0)
    mean = (weight * values).sum(axis=1) / total[:, 0]
    spread = (weight / total * (values - mean[:, None]) ** 2).sum(axis=1)
    count = np.maximum((weight > 0).sum(axis=1) - 1, 1)
    return mean, np.sqrt(spread / count)


def path_errors(
    base: FederatedSparseRegressor,
    x: Any,
    y: Array,
    groups: Any,
    weight: Array,
    path: Indices,
    folds: Sequence[tuple[Indices, Indices]],
) -> Array | None:
    """Return mean squared errors [numbers, folds]; None if they need fits of their own."""
    if not _is_one_shot(base, x) or groups is None:
        return None
    base = clone(base)
    base.preprocessing_ = None
    _, owner = owners(groups, len(y))
    held = [np.unique(owner[rows]) for _, rows in folds]
    whole = all(
        not np.isin(owner[train], sites).any() and len(train) + len(rows) == len(y)
        for sites, (train, rows) in zip(held, folds, strict=True)
    )
    if not whole:
        return None
    columns = np.concatenate([x, y[:, None]], axis=1)
    columns = columns - np.average(columns, axis=0, weights=weight)  # known from the moments
    sites = [
        Products.of(columns[owner == site], weight[owner == site])
        for site in range(int(owner.max()) + 1)
    ]
    return held_out_errors(base, sites, path, held)


def _is_one_shot(base: FederatedSparseRegressor, x: Any) -> bool:
    """Return whether the fit needs the whole matrix of products once, and nothing else."""
    plain: bool = (
        base.solver in ("auto", "exact")
        and base.center == "global"
        and bool(base.fit_intercept)
        and base.dictionary is None
        and base.participation == 1
        and base.batch_size is None
    )
    if not plain or is_table(x) or sparse.issparse(x):
        return False
    width = int(x.shape[1])
    beside = FedBestSubset(max_bytes=int(base.max_bytes)).beside(width, 0, quadratic=True)
    return beside == width


def _model(base: FederatedSparseRegressor, train: Products, number: int) -> tuple[Array, float]:
    """Return slopes and intercept of the best subset of these sites."""
    width = len(train.sums) - 1
    mean = train.sums / train.count
    around = train.products - train.count * np.outer(mean, mean)
    variance = np.diag(around)[:-1] / train.count
    constant = variance <= 1e-12 * (np.diag(train.products)[:-1] / train.count)
    deviation = np.where(constant, 0.0, np.sqrt(np.maximum(variance, 0.0)))
    scale = np.where(constant | (not base.standardize), 1.0, deviation)
    inner = around[:-1, :-1] / np.outer(scale, scale) * np.outer(~constant, ~constant)
    right = around[:-1, -1] / scale * ~constant
    l2 = 0.0 if base.l2 is None else base.l2
    kept = base._kept(width)
    problem = GLM(width, "squared-half", l2=l2, intercept=False, keep=kept, weighted=True)
    tau = min(number, width - len(kept))
    start = problem.init(Key(0))["coef"]
    rules = FedBestSubset(tau=tau, max_bytes=int(base.max_bytes), units=base._units(width)).rules(
        problem, start
    )
    sums = Sums(
        train.count, around[-1, -1] / 2, -right, np.diag(inner), inner[np.triu_indices(width)]
    )
    search = best_subset.advance(subset_state.begin(rules, np.zeros(width)), sums, rules)
    slopes = search.coefficients / scale
    return slopes, float(mean[-1] - slopes @ mean[:-1])
