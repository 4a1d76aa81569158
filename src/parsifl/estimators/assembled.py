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
from parsifl.estimators.one_shot import Products, held_out_errors, mean_errors


@dataclass(frozen=True, eq=False)
class DeployedFit:
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
    products
        The products of all columns at every site, if the sites sent them; else empty.
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
    products: Sequence[Products] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def assembled(estimator: FederatedSparse, outcome: DeployedFit) -> FederatedSparse:
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
        if len(outcome.products) > 1:
            _note_errors(model, outcome.products)
    else:
        model._note(found.mean, found.scale, constant=outcome.constant)
    return estimator


def _note_errors(model: Any, sites: Sequence[Products]) -> None:
    """Keep the error of each number of terms on sites left out, as cross-validation does."""
    model.path_ = model._exact.path_numbers()
    held = [np.array([site]) for site in range(len(sites))]
    errors = held_out_errors(model, sites, model.path_, held)
    rows = np.array([part.count for part in sites])
    model.error_path_ = errors
    model.mean_error_, model.standard_error_ = mean_errors(errors, rows)
