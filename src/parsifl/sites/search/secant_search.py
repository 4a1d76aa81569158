"""Best-subset search from gradients: the steps of a server whose answers are few and noisy.

A curvature on c columns reveals c + 1 combinations of the rows of a site, a gradient one. So the
server asks for loss and gradient, and keeps a quadratic model whose curvature it learns
from differences of gradients (BFGS). A gradient has an entry for every column, so each step also
corrects the products of the columns of the step with all others. `SubsetModel` exchanges units on
this model, as in `best_subset`, and its minimiser is the next point.

No line search is needed: the update makes the model agree with the gradients at both ends of a
step that failed, so that its next minimiser is another one.

When the steps have converged, one answer has the products of the selected columns with all columns.
This is all that the gain of every exchange of one unit depends on, and the sites' last sums are a
part of it. The search ends if no exchange lowers this model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from parsifl.sites.search.best_subset import moved, penalised, quadratic_model, symmetric
from parsifl.sites.search.subset_model import SubsetModel, Units
from parsifl.sites.search.subset_state import Array, Indices, Mask, Phase, Rules, Search, Sums

_CLOSE = 1e-2
"""The squared distance to the minimum, in standard errors, at which products are requested."""
_CURVED = 0.01
"""The change of the gradient along a step, below which noise would decide the update."""
_NEAR = 0.1
"""The same at which one Newton step with these products suffices."""
_WORTH = 0.01
"""The decrease of the loss, a log-likelihood, that an exchange must predict."""
_FARTHEST = 3.0
"""The longest step, in standard deviations of the predictor."""
_FAILURES = 4
"""Consecutive trials without progress before a point counts as the minimum."""
_TERMS = 10.0
"""The largest loss of a row, relative to the mean loss (at least .5), for the noise of the loss."""
_TINY = 1e-300


def advance(search: Search, sums: Sums, rules: Rules) -> Search:
    """Process the answer to the last request and return the next state.

    `search.tries` is 1 if the model has the products of the accepted support.
    """
    if search.done:
        return search
    sums = penalised(sums, search.asked, rules)
    if not search.rows:
        return _propose(moved(_begun(search, sums), sums), rules)
    if not math.isclose(sums.rows, search.rows, rel_tol=1e-9):  # other sites: begin with products
        return _look(moved(search, sums))
    if search.phase == Phase.LOOK:
        products = _completed(sums, search.candidates, rules)
        looked = replace(moved(search, sums), curvature=products, tries=1)
        return _propose(looked, rules)
    step = search.asked - search.coefficients
    change = sums.gradient - search.gradient - rules.ridge * sums.rows * step
    curvature = _updated(search, step, change)
    fall = search.loss - sums.loss
    if abs(fall) < rules.noise * _TERMS * max(abs(sums.loss) / sums.rows, 0.5):
        fall = -float((search.gradient + sums.gradient) @ step) / 2  # more precise if short
    least = _WORTH if search.phase == Phase.EXCHANGE else 0.0
    if fall > least:
        failures = search.failures + 1 if fall < _CLOSE else 0  # noise can seem to be progress
        accepted = replace(moved(search, sums), curvature=curvature, tries=0)
        return _propose(replace(accepted, failures=failures), rules)
    return _propose(replace(search, curvature=curvature, failures=search.failures + 1), rules)


def _begun(search: Search, sums: Sums) -> Search:
    """Start the model with the diagonal of the curvature, which this answer has."""
    size = len(sums.diagonal)
    diagonal = np.diag(np.maximum(sums.diagonal, 0.0))[np.triu_indices(size)]
    return replace(search, known=np.arange(size), curvature=diagonal, scale=sums.diagonal)


def _updated(search: Search, step: Array, change: Array) -> Array:
    """Return the packed curvature of the model after a step that changed the gradient."""
    full = symmetric(search.curvature, np.zeros(len(step)))
    before, curved = full @ step, float(step @ change)
    if curved > _CURVED and float(step @ before) > 0:
        full += np.outer(change, change) / curved
        full -= np.outer(before, before) / float(step @ before)
    packed: Array = full[np.triu_indices(len(step))]
    return packed


def _completed(sums: Sums, columns: Indices, rules: Rules) -> Array:
    """Return a packed curvature with these products of some columns with all, [c * d].

    The others are those of columns that are uncorrelated given these columns.
    """
    size = rules.width
    rows = sums.curvature.reshape(len(columns), size)
    inner = (rows[:, columns] + rows[:, columns].T) / 2
    values, vectors = np.linalg.eigh(inner)
    large = values > 1e-10 * max(float(values.max(initial=0.0)), 0.0)
    through = (vectors[:, large] / np.sqrt(values[large])).T @ rows
    full = through.T @ through
    left = np.maximum(sums.diagonal - rules.ridge * sums.rows - np.diag(full), 0.0)
    left[columns] = 0.0
    packed: Array = (full + np.diag(left))[np.triu_indices(size)]
    return packed


def _propose(search: Search, rules: Rules) -> Search:
    """Ask for the minimiser of the model over all supports, or for products, or end."""
    model, names = quadratic_model(search, rules)
    labels = np.unique(rules.labels[search.support & (rules.labels >= 0)])
    here: Units = tuple(np.searchsorted(names, labels).tolist())
    chosen = here
    if search.failures < _FAILURES:
        thorough = len(here) < rules.count or search.tries == 1
        chosen = model.search(rules.count, here, thorough=thorough, least=_WORTH)
    target, support = _minimiser(model, chosen, rules)
    step = target - search.coefficients
    decrement = -float(search.gradient @ step)
    if chosen == here and (decrement < _CLOSE or search.tries or search.failures >= _FAILURES):
        if search.tries:
            return _ended(search, Phase.CONVERGED if decrement < _NEAR else Phase.STALLED)
        return _look(search)
    spread = math.sqrt(float(search.scale @ step**2) / max(float(search.scale.max()), _TINY))
    if spread > _FARTHEST and set(here) <= set(chosen):
        target = search.coefficients + step * (_FARTHEST / spread)
    return replace(
        search,
        phase=Phase.NEWTON if chosen == here else Phase.EXCHANGE,
        asked=target,
        asked_support=support,
        candidates=np.zeros(0, np.int64),
    )


def _look(search: Search) -> Search:
    return replace(_ended(search, Phase.LOOK), candidates=np.flatnonzero(search.support))


def _minimiser(model: SubsetModel, chosen: Units, rules: Rules) -> tuple[Array, Mask]:
    fit = model.fit(chosen)
    target, support = np.zeros(rules.width), np.zeros(rules.width, np.bool_)
    target[fit.columns], support[fit.columns] = fit.coefficients, True
    return target, support


def _ended(search: Search, phase: Phase) -> Search:
    return replace(
        search,
        phase=phase,
        asked=search.coefficients,
        asked_support=search.support,
        candidates=np.zeros(0, np.int64),
    )
