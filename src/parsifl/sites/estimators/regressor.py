"""Sparse linear regression across sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import RegressorMixin

from parsifl.linear.glm import GLM
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.moments import Array, centred, centred_by_client, gather, scaled
from parsifl.sites.estimators.preprocessor import owners
from parsifl.sites.estimators.settings import weighting

_REWEIGHTINGS, _SHRUNK = 2, 4.0


class FederatedSparseRegressor(RegressorMixin, FederatedSparse):  # type: ignore[misc]  # untyped
    """Linear regression with few non-zero coefficients, fitted without pooling the sites' rows.

    Features are standardised by global moments, computed from sums that sites send in one round;
    coefficients are reported in the original units. The default solver selects what best-subset
    selection on the pooled rows would select, however rows are divided among sites.

    Parameters
    ----------
    n_nonzero_coefs
        Maximum number of non-zero coefficients, in addition to `keep`; None is a tenth of the
        features. With a dictionary it counts atoms, with `column_groups` groups. 0 fits the
        columns of `keep` and selects nothing.
    solver
        "exact" uses sums over sites and equals the pooled fit (see `FedBestSubset`). "auto" uses it
        if a site's upload per round is at most `max_bytes`, else "fedgradmp" (for classes
        "fedht"). The solvers of the papers average models and need fewer bytes for many columns:
        "fedgradmp", "inexactfedgradmp", "fedht", "fediterht", "distributediht", "fedmid" or
        "feddualavg" (the last two with a hard-thresholding proximal operator).
    rounds
        Maximum number of rounds; None is 20 for matching pursuit and 60 for the others. "exact"
        stops by itself, the others when the loss has converged.
    local_steps, batch_size
        Local iterations per round, and rows per mini-batch (None: all). Not for "exact".
    lr
        Step size of the gradient methods; None is 1 / L, "theory" the 1 / (6 L) of Fed-HT's
        theorems. It refers to the mean over rows of the loss, in standardised units. The squared
        loss is (u - y)^2 / 2: a step size for (u - y)^2, the loss of Fed-HT's paper and of
        `GLM("squared")`, has to be doubled.
    l2
        Ridge strength, in standardised units; None is 0.
    fit_intercept, standardize
        Whether there is an intercept, and whether features are scaled to variance 1. A CSR matrix
        is scaled but never centred.
    center
        "global" subtracts global means; "client" gives every site its own intercept, which
        removes site effects and never leaves the site.
    keep
        Features that are always in the model, in addition to `n_nonzero_coefs`: positions or a
        mask. A constant feature duplicates the intercept: its coefficient is 0, with a warning.
    column_groups
        The group of each column (any labels): the columns of a group, such as the levels of a
        factor, enter together. Only for "exact".
    dictionary
        Atoms as columns [features, atoms]; then atoms are selected, for standardised features.
        A matrix (for example learned by K-SVD) is sent to every site once, and its bytes are
        counted; a `RandomDictionary` (Gaussian or orthonormal atoms) is sent as its seed.
    refit
        Whether the solvers of the papers end with pooled least squares on their support, from
        sums. Otherwise the coefficients are those of the solver, which are less accurate.
    max_bytes
        The largest upload of a site in a round of "exact".
    certificate_rounds
        Maximum number of additional rounds of "exact" for `certificate_`. A squared loss fitted in
        one round needs none; other losses need some tens of rounds for about 20 columns.
    certificate_nodes
        How many supports and sets of supports the proof for a squared loss may bound; None: as
        many as take about a second, at most 20,000.
    participation
        The fraction of sites per round; "exact" needs all.
    random_state
        Seed of mini-batches and cohorts.
    site_variances
        Whether the noise differs between sites: the fit is repeated twice with each site weighted
        by the inverse of its residual variance, whose logarithm is shrunk to the mean of all sites
        as by 4 rows. Only for "exact".
    solver_options
        Further settings of the algorithm by name, such as {"candidates": 50} for "exact" or
        {"radius": 10.0} or {"delta": 1e-6} for those of the papers. Matching pursuit prunes by
        removal cost; {"prune": "largest"} is the rule of its paper.
    weight_type
        What `sample_weight` means for standard errors and criteria; estimates do not depend on
        it. "sampling" are weights of a sample, such as inverse probabilities: errors are robust.
        "frequency" says how often a row occurred. "precision" are inverse variances, up to a
        factor in a linear regression.

    Attributes
    ----------
    coef_, intercept_
        In the units of X.
    support_
        Positions of the non-zero coefficients (of atoms, if there is a dictionary).
    clients_
        The distinct values of `groups`, in the order of site numbers.
    solver_, solver_reason_
        The solver that was used, and why.
    n_iter_, history_, loss_
        Rounds; the record of each, with loss and support; the mean loss of the fit (l2 included).
    certificate_
        A bound on the distance of the support from the optimum, by branch and bound.
    bytes_up_, bytes_down_
        All bytes that sites sent and received, including the moments and the dictionary.
    site_variances_
        The residual variance of each site, if `site_variances`.
    dictionary_bytes_
        The part of these bytes used for the dictionary, if there is one.

    Examples
    --------
    >>> X = np.random.default_rng(0).standard_normal((60, 8))
    >>> y, hospital = 3 * X[:, 1] - X[:, 5] + 1, np.arange(60) % 4
    >>> model = FederatedSparseRegressor(2).fit(X, y, groups=hospital)
    >>> model.support_.tolist(), model.coef_[[1, 5]].round(6).tolist()
    ([1, 5], [3.0, -1.0])
    >>> model.n_iter_, model.certificate_.proven
    (1, True)
    """

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> FederatedSparseRegressor:
        """Fit to rows that belong to the sites named in `groups` (None: a single site)."""
        if not self.site_variances:
            return self._fit(X, y, groups, sample_weight)
        rows = len(y)
        names, owner = owners(groups, rows)
        weight = self._weights(sample_weight, np.empty((rows, 1)))
        self._fit(X, y, groups, weight)
        sent = self.bytes_up_, self.bytes_down_
        for _ in range(_REWEIGHTINGS):
            fit = self._fitted_exactly("site_variances=True")
            used = [site for site in range(len(names)) if weight[owner == site].any()]
            count = np.array([weight[owner == site].sum() for site in used])
            variances = 2 * fit.losses / fit.rows
            logs = np.log(np.maximum(variances, max(1e-12 * float(variances.max()), 1e-300)))
            common = np.average(logs, weights=count)
            variance = np.full(len(names), np.nan)
            variance[used] = np.exp((count * logs + _SHRUNK * common) / (count + _SHRUNK))
            scale = np.where(np.isfinite(variance), variance, 1.0)[owner]
            self._fit(X, y, groups, weight / scale)
            sent = sent[0] + self.bytes_up_, sent[1] + self.bytes_down_
        self.site_variances_ = variance
        # the weights of sites are known to be precisions; those of rows are what they were before
        self._weighting = weighting(self.weight_type, sample_weight)
        self._note_weights()
        self.bytes_up_, self.bytes_down_ = sent
        return self

    def _fit(self, X: Any, y: Any, groups: Any, sample_weight: Any) -> FederatedSparseRegressor:
        X, y = self._validated(
            X, y, groups, sample_weight, accept_sparse="csr", y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        self.clients_, parts = self._clients(groups, len(y))
        weight = self._weights(sample_weight, X)
        per_site = self._check_center()
        moments = gather(X, y, weight, parts, standardize=self.standardize)
        x, target, intercept = X, y, False
        if sparse.issparse(X):
            intercept = bool(self.fit_intercept)
            x = scaled(X, moments, intercept=intercept)
        elif self.fit_intercept:
            x, target = centred(X, moments), y - moments.target
            if per_site:
                x, target = centred_by_client(x, target, weight, parts)
            x = x / moments.scale
        else:
            x = X / moments.scale
        always = self._kept(X.shape[1])
        self._say_what_cannot_be_kept(x, always)
        problem = GLM(
            X.shape[1],
            "squared-half",
            l2=0.0 if self.l2 is None else self.l2,
            intercept=intercept,
            keep=always,
            dictionary=self._atoms(),
            weighted=True,
        )
        targets = torch.from_numpy(np.stack([target, weight], axis=1))
        coefficients = self._train(
            problem,
            x,
            targets,
            parts,
            moments,
            start=moments.target,
            own_intercept=per_site and intercept,
        )
        self._say_if_pooled(groups)
        self._report(coefficients, problem, moments.scale)
        if self.fit_intercept and (not intercept or per_site):
            self.intercept_ = moments.target - float(self.coef_ @ moments.mean)
        centre = np.zeros_like(moments.mean) if intercept else moments.mean
        if not self.fit_intercept or intercept:
            self._note(centre, moments.scale)
        else:
            self._note(centre, moments.scale, "client" if per_site else "global", moments.target)
        return self

    def _family(self) -> str:
        return "gaussian"

    def _report(self, coefficients: Array, problem: GLM, scale: Array) -> None:
        self.intercept_ = float(coefficients[-1]) if problem.intercept else 0.0
        weights = coefficients[:-1] if problem.intercept else coefficients
        self.support_ = np.flatnonzero(weights)
        if problem.dictionary is not None:
            self.atom_coef_ = weights
            weights = problem.dictionary.numpy() @ weights
        self.coef_: Array = weights / scale

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        X = self._features(X, accept_sparse="csr")
        return np.asarray(X @ self.coef_ + self.intercept_)
