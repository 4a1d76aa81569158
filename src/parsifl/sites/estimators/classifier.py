"""Sparse logistic and softmax regression across sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit, logit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from parsifl.core.errors import ConfigError
from parsifl.linear.glm import GLM
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.moments import Array, Indices, gather


class FederatedSparseClassifier(ClassifierMixin, FederatedSparse):  # type: ignore[misc]  # untyped
    """Logistic (two classes) or softmax regression with few non-zero coefficients per class.

    Like `FederatedSparseRegressor`, with these differences: `positive` names the class of two
    whose odds are modelled (None: the one that sorts last); `n_nonzero_coefs` counts coefficients
    of each class; "exact" does not support more than two classes, for which "auto" uses Fed-HT
    with a refit (or use scikit-learn's `OneVsRestClassifier` around this one); a site may have
    rows of only one class, but not the whole federation. Coefficients are those of pooled maximum
    likelihood on the support. If columns separate the classes, there is no maximum: a warning says
    so, and `l2` (None: no ridge, but 0.001 inside the solvers of the papers) helps.

    Attributes
    ----------
    classes_
        The labels. The second is modelled: `positive`, if it is set.
    n_events_
        The number of rows of the second of two classes.
    coef_, intercept_
        In the units of X: one row for two classes (the odds of the second), else one per class.
    support_
        Positions of the features that some class uses.

    Examples
    --------
    >>> X = np.random.default_rng(0).standard_normal((80, 6))
    >>> y = X[:, 4] + np.random.default_rng(1).standard_normal(80) > 0
    >>> model = FederatedSparseClassifier(1).fit(X, y, np.arange(80) % 4)
    >>> model.support_.tolist(), model.solver_
    ([4], 'exact')
    """

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> FederatedSparseClassifier:
        """Fit to rows that belong to the sites named in `groups` (None: a single site)."""
        if self.site_variances:
            raise ConfigError(
                "site_variances requires linear regression: classes have no noise term"
            )
        X, y = self._validated(X, y, groups, sample_weight, accept_sparse="csr")
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"there is only one class, {self.classes_[0]}; 2 are needed")
        labels = self._in_order(labels)
        self.clients_, parts = self._clients(groups, len(labels))
        weight = self._weights(sample_weight, X)
        if len(np.unique(labels[weight > 0])) < 2:
            raise ValueError(
                "all rows with a positive sample_weight belong to one class; 2 are needed"
            )
        own_intercept = self._check_center()
        moments = gather(X, labels.astype(np.float64), weight, parts, standardize=self.standardize)
        x, centre = self._standardised(X, moments)
        always = self._kept(X.shape[1])
        self._say_what_cannot_be_kept(x, always)
        binary = len(self.classes_) == 2
        problem = GLM(
            X.shape[1],
            "logistic" if binary else "softmax",
            classes=None if binary else len(self.classes_),
            l2=0.0 if self.l2 is None else self.l2,
            intercept=bool(self.fit_intercept),
            keep=always,
            dictionary=self._atoms(),
            weighted=True,
        )
        targets = torch.from_numpy(np.stack([labels.astype(np.float64), weight], axis=1))
        start = float(logit(moments.target)) if binary else 0.0
        coefficients = self._train(
            problem, x, targets, parts, moments, start=start, own_intercept=own_intercept
        )
        self._say_if_pooled(groups)
        if own_intercept and binary:
            coefficients = self._with_common_intercept(
                coefficients, problem, x, targets, len(parts)
            )
        self._note(centre, moments.scale)
        if binary:
            self.n_events_ = int((labels[weight > 0] == 1).sum())
        coefficients = np.atleast_2d(coefficients)
        weights = coefficients[:, :-1] if problem.intercept else coefficients
        self.support_ = np.flatnonzero((weights != 0).any(axis=0))
        if problem.dictionary is not None:
            self.atom_coef_ = weights
            weights = weights @ problem.dictionary.numpy().T
        self.coef_ = weights / moments.scale
        offset = coefficients[:, -1] if problem.intercept else np.zeros(len(coefficients))
        self.intercept_ = offset - np.asarray(self.coef_ * centre).sum(axis=1)
        return self

    def _in_order(self, labels: Indices) -> Indices:
        """Put the class `positive` last in `classes_`; return the labels in this order."""
        if self.positive is None:
            return labels
        names = self.classes_.tolist()
        if len(names) != 2 or self.positive not in names:
            raise ValueError(
                f"positive must be one of two classes, got {self.positive!r}; y has {names}"
            )
        if names.index(self.positive) == 1:
            return labels
        self.classes_ = self.classes_[::-1]
        return 1 - labels

    def _family(self) -> str:
        return "binomial"

    def decision_function(self, X: Any) -> Array:
        """Return the log-odds of the second class, or one score per class."""
        X = self._features(X, accept_sparse="csr")
        scores: Array = np.asarray(X @ self.coef_.T) + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of every class."""
        scores = self.decision_function(X)
        if scores.ndim == 2:
            return np.asarray(softmax(scores, axis=1))
        second = expit(scores)
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the most probable labels."""
        scores = self.decision_function(X)
        chosen = scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(np.int64)
        return np.asarray(self.classes_[chosen])
