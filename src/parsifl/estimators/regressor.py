"""Sparse linear regression across clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from parsifl.estimators.base import FederatedSparse
from parsifl.estimators.moments import (
    Array,
    Indices,
    centred,
    centred_by_client,
    gather,
    refit,
    scaled,
)
from parsifl.linear.glm import GLM


class FederatedSparseRegressor(RegressorMixin, FederatedSparse):  # type: ignore[misc]  # untyped
    """Linear regression with few non-zero coefficients, fitted without pooling the clients' rows.

    Features are standardised by global moments, found from sums that clients send in one round;
    coefficients are reported in the original units. Nothing is said about their uncertainty: there
    are no valid p-values after selection.

    Parameters
    ----------
    n_nonzero_coefs
        How many coefficients may differ from zero; None is a tenth of the features. With a
        dictionary it counts atoms.
    solver
        "fedgradmp", "inexactfedgradmp", "fedht", "fediterht", "distributediht", "fedmid" or
        "feddualavg" (the last two with a hard-thresholding proximal operator).
    rounds, local_steps, batch
        Rounds of communication, local iterations in each, and rows a mini-batch (None: all).
    lr
        Step size of the gradient methods; None takes 1 / L, "theory" the 1 / (6 L) of Fed-HT's
        theorems.
    l2
        Ridge strength, in standardised units.
    fit_intercept, standardize
        Whether there is an intercept, and whether features are scaled to variance 1. A CSR matrix
        is scaled but never centred; columns that lie far from zero harm the selection then, with
        a warning.
    center
        "global" subtracts global means; "client" subtracts every client's own means of features
        and target, which removes site effects (dense features only).
    keep
        Features that are always in the model, on top of `n_nonzero_coefs`: positions or a mask.
        A constant one cannot be told from the intercept: it gets 0, with a warning.
    dictionary
        Atoms as columns [features, atoms]; then atoms are selected, for standardised features.
        A matrix (learned by K-SVD, say) is sent to every client once, and booked; a
        `RandomDictionary` (Gaussian or orthonormal atoms) travels as its seed.
    refit
        Ends with pooled least squares on the selected support, from products x'x and x'y of the
        support's columns that every client sends once. Without it the coefficients are those of
        the solver, which prunes a larger support and is a little off.
    participation
        The fraction of clients in a round.
    random_state
        Seed of mini-batches and cohorts.

    Attributes
    ----------
    coef_, intercept_
        In the units of X.
    support_
        Positions of the non-zero coefficients (of atoms, if there is a dictionary).
    clients_
        The distinct values of `groups`, in the order of client numbers.
    n_iter_, history_
        Rounds, and the record of each.
    bytes_up_, bytes_down_
        All bytes that clients sent and received, the moments and the dictionary included.
    dictionary_bytes_
        What the dictionary cost of that, if there is one.

    Examples
    --------
    >>> X = np.random.default_rng(0).standard_normal((60, 8))
    >>> y, hospital = 3 * X[:, 1] - X[:, 5] + 1, np.arange(60) % 4
    >>> model = FederatedSparseRegressor(2, rounds=3).fit(X, y, groups=hospital)
    >>> model.support_.tolist(), model.coef_[[1, 5]].round(6).tolist()
    ([1, 5], [3.0, -1.0])
    """

    def __init__(  # noqa: PLR0913 - scikit-learn reads the parameters from the signature
        self,
        n_nonzero_coefs: int | None = None,
        *,
        solver: str = "fedgradmp",
        rounds: int = 20,
        local_steps: int = 3,
        batch: int | None = None,
        lr: float | str | None = None,
        l2: float = 0.0,
        fit_intercept: bool = True,
        standardize: bool = True,
        center: str = "global",
        keep: Any = (),
        dictionary: Any = None,
        refit: bool = True,
        participation: float = 1.0,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            n_nonzero_coefs,
            solver=solver,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            lr=lr,
            l2=l2,
            fit_intercept=fit_intercept,
            standardize=standardize,
            keep=keep,
            dictionary=dictionary,
            participation=participation,
            random_state=random_state,
        )
        self.center = center
        self.refit = refit

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> FederatedSparseRegressor:
        """Fit to rows that belong to the clients named in `groups` (None: a single client)."""
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        self.clients_, parts = self._clients(groups, len(y))
        weight = self._weights(sample_weight, X)
        if self.center not in ("global", "client"):
            raise ValueError(f"center must be 'global' or 'client', got {self.center!r}")
        if self.center == "client" and sparse.issparse(X):
            raise ValueError("center='client' needs dense features: a CSR matrix is not centred")
        if self.center == "client" and not self.fit_intercept:
            raise ValueError("center='client' gives every client an intercept: set fit_intercept")
        moments = gather(X, y, weight, parts, standardize=self.standardize)
        x, target, intercept = X, y, False
        if sparse.issparse(X):
            intercept = bool(self.fit_intercept)
            x = scaled(X, moments, intercept=intercept)
        elif self.fit_intercept:
            x, target = centred(X, moments), y - moments.target
            if self.center == "client":
                x, target = centred_by_client(x, target, weight, parts)
            x = x / moments.scale
        else:
            x = X / moments.scale
        kept = self._kept(X.shape[1])
        self._say_what_cannot_be_kept(x, kept)
        problem = GLM(
            X.shape[1],
            "squared-half",
            l2=self.l2,
            intercept=intercept,
            keep=kept,
            dictionary=self._atoms(),
            weighted=True,
        )
        targets = torch.from_numpy(np.stack([target, weight], axis=1))
        found = self._train(problem, x, targets, parts, moments)
        if self.refit:
            found = self._refitted(found, problem, x, target, weight, parts)
        self._report(found, problem, moments.scale)
        if self.fit_intercept and not intercept:
            self.intercept_ = moments.target - float(self.coef_ @ moments.mean)
        return self

    def _refitted(
        self,
        found: Array,
        problem: GLM,
        x: Any,
        target: Array,
        weight: Array,
        parts: list[Indices],
    ) -> Array:
        """Replace the coefficients on the support by pooled least squares, in one booked round."""
        slopes = found[:-1] if problem.intercept else found
        chosen = np.flatnonzero(slopes)
        if problem.dictionary is not None:
            columns = np.asarray(x @ problem.dictionary.numpy()[:, chosen])
        else:
            part: Any = x[:, chosen]
            columns = part.toarray() if sparse.issparse(x) else part
        ridge = np.full(len(chosen), self.l2)
        if problem.intercept:
            columns = np.concatenate([columns, np.ones((len(columns), 1))], axis=1)
            chosen, ridge = np.append(chosen, len(slopes)), np.append(ridge, 0.0)
        values, sent = refit(columns, target, weight, parts, ridge)
        self.bytes_up_ += sent
        exact = np.zeros_like(found)
        exact[chosen] = values
        return exact

    def _report(self, found: Array, problem: GLM, scale: Array) -> None:
        self.intercept_ = float(found[-1]) if problem.intercept else 0.0
        slopes = found[:-1] if problem.intercept else found
        self.support_ = np.flatnonzero(slopes)
        if problem.dictionary is not None:
            self.atom_coef_ = slopes
            slopes = problem.dictionary.numpy() @ slopes
        self.coef_: Array = slopes / scale

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ self.coef_ + self.intercept_)
