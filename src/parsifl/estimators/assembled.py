"""An estimator from the outcome of rounds that ran elsewhere: a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parsifl.data.preprocessing import Preprocessing
from parsifl.estimators.base import FederatedSparse
from parsifl.estimators.exact import ExactFit
from parsifl.estimators.moments import Array


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a deployment found.

    Attributes
    ----------
    preprocessing, sites
        What the sites agreed on, and their names.
    coefficients
        In standardised units; an intercept is the last, but for a linear regression.
    exact
        The last sums of the lossless solver; None for the others.
    target_mean, classes
        Of the target: its mean (linear regression), its two classes (logistic regression).
    solver, history, bytes_up, bytes_down
        The algorithm, its rounds, and all bytes, the agreement included.
    left_out
        Sites whose guards kept them out of the fit, with what they said.
    """

    preprocessing: Preprocessing
    sites: Sequence[str]
    coefficients: Array
    exact: ExactFit | None
    target_mean: float
    classes: tuple[str, ...]
    solver: str
    history: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    constant: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)


def assembled(estimator: FederatedSparse, outcome: Outcome) -> FederatedSparse:
    """Return the estimator, fitted as if `fit` had seen the rows of all sites."""
    family, found = estimator._family(), outcome.preprocessing
    model: Any = estimator
    model.preprocessing_ = found
    model.feature_names_in_ = np.array([column.name for column in found.columns], dtype=object)
    model.n_features_in_ = len(found.columns)
    model.clients_ = np.array(outcome.sites)
    model.left_out_ = dict(outcome.left_out)
    model.solver_, model.solver_reason_ = outcome.solver, "as deployed"
    model.history_, model.n_iter_ = outcome.history, len(outcome.history)
    model.bytes_up_, model.bytes_down_ = outcome.bytes_up, outcome.bytes_down
    model._exact = outcome.exact
    if outcome.exact is not None:
        model.loss_ = outcome.exact.search.loss / outcome.exact.search.rows
    width = len(found.names)
    slopes = outcome.coefficients[:width]
    model.support_ = np.flatnonzero(slopes)
    model.coef_ = slopes / found.scale
    if family == "cox":
        model._note(np.zeros(width), found.scale)
        return estimator
    centred = family == "gaussian"
    base = outcome.target_mean if centred else float(outcome.coefficients[-1])
    model.intercept_ = base - float(model.coef_ @ found.mean)
    if family == "binomial":
        model.classes_ = np.array(outcome.classes)
        model.coef_, model.intercept_ = model.coef_[None], np.array([model.intercept_])
    if centred:
        model._note(found.mean, found.scale, "global", outcome.target_mean)
    else:
        model._note(found.mean, found.scale, constant=outcome.constant)
    return estimator
