"""Sparse Poisson regression across sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import gammaln, xlogy
from sklearn.base import RegressorMixin

from parsifl.linear.glm import GLM
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.moments import Array, gather


class FederatedSparsePoisson(RegressorMixin, FederatedSparse):  # type: ignore[misc]  # untyped
    """Log-linear regression of counts with few non-zero coefficients; equal to the pooled fit.

    The parameters are those of `FederatedSparseRegressor`; the only solver is "exact". The score
    is the fraction of the deviance that is explained.

    Examples
    --------
    >>> draw = np.random.default_rng(0)
    >>> X = draw.standard_normal((200, 6))
    >>> y = draw.poisson(np.exp(0.5 + 0.8 * X[:, 3]))
    >>> model = FederatedSparsePoisson(1).fit(X, y, groups=np.arange(200) % 4)
    >>> model.support_.tolist(), model.coef_[3].round(1).item()
    ([3], 0.8)
    """

    _papers = False

    def __init__(  # noqa: PLR0913 - scikit-learn reads the parameters from the signature
        self,
        n_nonzero_coefs: int | None = None,
        *,
        solver: str = "auto",
        rounds: int | None = None,
        l2: float | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        center: str = "global",
        keep: Any = (),
        column_groups: Any = None,
        max_bytes: int = 8_000_000,
        certificate_rounds: int = 0,
        weight_type: str = "sampling",
    ) -> None:
        self.n_nonzero_coefs = n_nonzero_coefs
        self.solver = solver
        self.rounds = rounds
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.center = center
        self.keep = keep
        self.column_groups = column_groups
        self.max_bytes = max_bytes
        self.certificate_rounds = certificate_rounds
        self.weight_type = weight_type

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
    ) -> FederatedSparsePoisson:
        """Fit to rows that belong to the sites named in `groups` (None: a single site).

        `offset` is added to the predictor of each row: the log of its exposure.
        """
        X, y = self._validated(
            X, y, groups, sample_weight, accept_sparse="csr", y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        if (y < 0).any():
            raise ValueError("counts must not be negative: y has a negative value")
        self.clients_, parts = self._clients(groups, len(y))
        weight = self._weights(sample_weight, X)
        if not (weight * y).any():
            raise ValueError("every count is 0: there is nothing to fit")
        own_intercept = self._check_center()
        shift = np.zeros(len(y)) if offset is None else np.asarray(offset, dtype=np.float64)
        if shift.shape != y.shape or not np.isfinite(shift).all():
            raise ValueError(f"offset must be a finite number for each of the {len(y)} rows")
        moments = gather(X, y, weight, parts, standardize=self.standardize)
        x, centre = self._standardised(X, moments)
        always = self._kept(X.shape[1])
        self._say_what_cannot_be_kept(x, always)
        problem = GLM(
            X.shape[1],
            "poisson",
            l2=0.0 if self.l2 is None else self.l2,
            intercept=bool(self.fit_intercept),
            keep=always,
            weighted=True,
            offset=True,
        )
        targets = torch.from_numpy(np.stack([y, weight, shift], axis=1))
        # sites also send the sums of their exposures
        start = float(np.log(moments.target / np.average(np.exp(shift), weights=weight)))
        coefficients = self._train(
            problem, x, targets, parts, moments, start=start, own_intercept=own_intercept
        )
        self._say_if_pooled(groups)
        if own_intercept:
            coefficients = self._with_common_intercept(
                coefficients, problem, x, targets, len(parts)
            )
        self._note(centre, moments.scale, constant=float(weight @ gammaln(y + 1)))
        weights = coefficients[:-1] if problem.intercept else coefficients
        self.support_ = np.flatnonzero(weights)
        self.coef_: Array = weights / moments.scale
        offset = float(coefficients[-1]) if problem.intercept else 0.0
        self.intercept_ = offset - float(self.coef_ @ centre)
        return self

    def _family(self) -> str:
        return "poisson"

    def predict(self, X: Any, offset: Any = 0.0) -> Array:
        """Return the expected counts; `offset` is the log of the exposure."""
        X = self._features(X, accept_sparse="csr")
        u = np.asarray(X @ self.coef_) + self.intercept_ + np.asarray(offset)
        return np.asarray(np.exp(np.clip(u, -700, 700)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the fraction of the deviance that is explained (1 is perfect)."""
        mean, y = self.predict(X), np.asarray(y, dtype=np.float64)
        level = np.full_like(mean, np.average(y, weights=sample_weight))
        left, total = (
            np.average(xlogy(y, y / at) - y + at, weights=sample_weight) for at in (mean, level)
        )
        return float(1 - left / total) if total > 0 else 0.0
