"""Lossless best-subset search from sums over sites: the steps of the server.

A step takes the sums of loss, gradient and curvature at the requested coefficients and returns the
next request. Every answer serves three purposes: it decides whether a trial is accepted (only if
the true loss decreases), it ranks the columns that are not in the model, and its curvature on the
candidates defines the quadratic model on which `SubsetModel` exchanges units without messages.

A trial on another support that cannot fall below the best loss is marked and not tried again. On
the accepted support the steps are Newton's, damped. The search ends when Newton has converged, all
columns with large scores are among the candidates, and no exchange lowers the model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from parsifl.sites.search.subset_model import Fit, SubsetModel, Units
from parsifl.sites.search.subset_state import (
    ALWAYS,
    Array,
    Indices,
    Mask,
    Phase,
    Rules,
    Search,
    Sums,
)

_ARMIJO = 1e-4
_SHORTEST = 2.0**-14
_INNER_STEPS = 4
_REJECTIONS = 6
"""Consecutive failed trials before the search ends."""
_POLISHED = 1e-4
"""The Newton decrement, relative to 1 + loss, above which a support is not yet left."""
_WORTH = 1e-7
"""The relative decrease of the loss that an exchange must predict."""


def advance(search: Search, sums: Sums, rules: Rules) -> Search:
    """Process the answer to the last request and return the next state."""
    if search.done:
        return search
    sums = penalised(sums, search.asked, rules)
    others = not math.isclose(sums.rows, search.rows, rel_tol=1e-9)  # no comparison is possible
    if search.phase == Phase.LOOK or others:
        return _explore(_accepted(search, sums), rules)
    if search.phase == Phase.NEWTON:
        return _after_newton(search, sums, rules)
    return _after_exchange(search, sums, rules)


def penalised(sums: Sums, at: Array, rules: Rules) -> Sums:
    """Add the l2 term to the loss, its gradient and the diagonal; not to the packed curvature."""
    ridge = rules.ridge * sums.rows
    return replace(
        sums,
        loss=sums.loss + float(ridge @ at**2) / 2,
        gradient=sums.gradient + ridge * at,
        diagonal=sums.diagonal + ridge,
    )


def moved(search: Search, sums: Sums) -> Search:
    """Return the search at the coefficients that the sums are about."""
    return replace(
        search,
        coefficients=search.asked,
        support=search.asked_support,
        loss=sums.loss,
        rows=sums.rows,
        gradient=sums.gradient,
        diagonal=sums.diagonal,
        failures=0,
    )


def _accepted(search: Search, sums: Sums) -> Search:
    return replace(
        moved(search, sums),
        known=search.candidates,
        curvature=sums.curvature,
        scale=sums.diagonal if math.isinf(search.loss) else search.scale,
        failures=0 if _material(sums.loss, search.loss) else search.failures,
    )


def _material(loss: float, before: float) -> bool:
    """Return whether the loss decreased so much that earlier failed exchanges may be retried."""
    return math.isinf(before) or loss < before - _POLISHED * abs(before)


def _after_newton(search: Search, sums: Sums, rules: Rules) -> Search:
    slack = rules.slack * (abs(search.loss) + sums.rows)
    if sums.loss <= search.pivot_loss - _ARMIJO * search.step * search.decrement + slack:
        return _explore(_accepted(search, sums), rules)
    if search.step <= _SHORTEST:
        return _finished(search, Phase.STALLED)
    return _shorter(search)


def _shorter(search: Search) -> Search:
    step = search.step / 2
    return replace(search, step=step, asked=search.pivot - step * search.direction)


def _after_exchange(search: Search, sums: Sums, rules: Rules) -> Search:
    if sums.loss < search.loss - 1e-9 * abs(search.loss):
        return _explore(_accepted(search, sums), rules)
    if search.phase == Phase.POLISH and sums.loss > search.pivot_loss - (
        _ARMIJO * search.step * search.decrement
    ):
        return _shorter(search) if search.step > 0.1 else _refuse(search, rules)
    inside = np.flatnonzero(search.asked_support)
    positions = np.searchsorted(search.candidates, inside)
    full = symmetric(sums.curvature, rules.ridge[search.candidates] * sums.rows)
    gradient = sums.gradient[inside]
    step = np.linalg.lstsq(full[np.ix_(positions, positions)], gradient, rcond=1e-12)[0]
    decrement = float(gradient @ step)
    hopeless = sums.loss - decrement > search.loss
    if hopeless or search.tries >= _INNER_STEPS or decrement < 1e-9 * (1 + abs(sums.loss)):
        return _refuse(search, rules)
    direction = np.zeros(rules.width)
    direction[inside] = step
    return replace(
        search,
        phase=Phase.POLISH,
        pivot=search.asked,
        direction=direction,
        pivot_loss=sums.loss,
        decrement=decrement,
        step=1.0,
        asked=search.asked - direction,
        tries=search.tries + 1,
    )


def _refuse(search: Search, rules: Rules) -> Search:
    labels = np.unique(rules.labels[search.asked_support & (rules.labels >= 0)])
    row = np.full(rules.count, -1, np.int64)
    row[: len(labels)] = labels
    refused = np.concatenate([search.refused, row[None]])
    return _explore(replace(search, refused=refused, failures=search.failures + 1), rules)


def _explore(search: Search, rules: Rules) -> Search:
    """Decide at the accepted point: exchange, Newton step, other candidates, or end."""
    wanted = _wanted(search, rules)
    if not len(search.known) or not np.isin(np.flatnonzero(search.support), search.known).all():
        return _look(search, wanted)
    is_complete = len(search.known) == rules.width
    model, names = quadratic_model(search, rules)
    here = _named(search.support, rules, names)
    if len(here) < rules.count and not is_complete and not _holds(search.known, wanted):
        return _look(search, wanted)
    least = 0.0 if rules.quadratic else _WORTH * abs(search.loss)
    chosen = here
    if search.failures < _REJECTIONS and not _unpolished(search, rules, model, here):
        chosen = model.search(
            rules.count,
            here,
            forbidden=_forbidden(search.refused, names),
            thorough=len(here) < rules.count or (is_complete and rules.quadratic),
            least=least,
        )
    fit = model.fit(chosen)
    columns = search.known[fit.columns]
    target = np.zeros(rules.width)
    target[columns] = fit.coefficients
    support = np.zeros(rules.width, np.bool_)
    support[columns] = True
    decrement = float(search.gradient @ (search.coefficients - target))
    if rules.quadratic and is_complete:
        value = -float(_value(model, search))
        return _finished(_moved(search, target, support, search.loss + value + fit.value, model))
    if chosen == here:
        if decrement < rules.tolerance * (1 + abs(search.loss)):
            if not is_complete and not _holds(search.known, wanted):
                return _look(search, wanted)
            return _finished(replace(search, coefficients=target))
        if _runs_off(search, rules, fit):
            return _finished(search, Phase.SEPARATED)
    growing = set(here) <= set(chosen)
    trial = replace(
        search,
        asked=target,
        asked_support=support,
        candidates=np.union1d(wanted, columns),
        tries=0,
        step=1.0,
    )
    if not growing:
        return replace(trial, phase=Phase.EXCHANGE)
    return replace(
        trial,
        phase=Phase.NEWTON,
        pivot=search.coefficients,
        direction=search.coefficients - target,
        pivot_loss=search.loss,
        decrement=max(decrement, 0.0),
    )


def _unpolished(search: Search, rules: Rules, model: SubsetModel, here: Units) -> bool:
    """Return whether the full support is too far from its minimum to compare with others."""
    if rules.quadratic or len(here) < rules.count:
        return False
    fit = model.fit(here)
    columns = search.known[fit.columns]
    fall = float(search.gradient[columns] @ (search.coefficients[columns] - fit.coefficients))
    return fall > _POLISHED * (1 + abs(search.loss))


def _value(model: SubsetModel, search: Search) -> float:
    z = search.coefficients[search.known]
    return float(z @ (model.curvature @ z) / 2 - model.target @ z)


def _moved(search: Search, target: Array, support: Mask, loss: float, model: SubsetModel) -> Search:
    """Accept a point of a quadratic loss with known curvature, without a request."""
    change = model.curvature @ (target - search.coefficients)
    return replace(
        search,
        coefficients=target,
        support=support,
        loss=loss,
        gradient=search.gradient + change,
    )


def _runs_off(search: Search, rules: Rules, fit: Fit) -> bool:
    """Return whether the loss has lost its curvature in some direction: it has no minimum.

    The size of a coefficient is no evidence. What a unit of it means depends on the family: the
    intercept of large counts is large, and a rare level may have a large coefficient.
    """
    inside = search.support & (search.scale > 0)
    if not inside.any() or (rules.ridge > 0).any():
        return False
    if (search.diagonal[inside] <= 1e-7 * search.scale[inside]).any():
        return True
    # the part of a column that is independent of the others has no curvature left
    left = 1 / np.maximum(np.square(fit.root).sum(0), 1e-300)
    return bool(fit.full_rank and (left <= 1e-9 * search.diagonal[search.known[fit.columns]]).any())


def _look(search: Search, wanted: Indices) -> Search:
    return replace(
        search,
        phase=Phase.LOOK,
        asked=search.coefficients,
        asked_support=search.support,
        candidates=wanted,
    )


def _finished(search: Search, phase: Phase = Phase.CONVERGED) -> Search:
    return replace(
        search,
        phase=phase,
        asked=search.coefficients,
        asked_support=search.support,
        candidates=search.known,
    )


def _wanted(search: Search, rules: Rules) -> Indices:
    """Return the columns of the support and of the units with the largest scores g^2 / h."""
    floor = 1e-12 * float(search.diagonal.max(initial=0.0))
    usable = search.diagonal > floor
    scores = np.where(usable, search.gradient**2 / np.where(usable, search.diagonal, 1.0), 0.0)
    inside = search.support | (rules.labels == ALWAYS)
    outside = np.flatnonzero(~inside & (rules.labels >= 0))
    labels = rules.labels[outside]
    if not len(outside):
        return np.flatnonzero(inside)
    sums = np.bincount(labels, weights=scores[outside])
    sizes = np.bincount(labels)
    order = np.argsort(-np.where(sizes > 0, sums, -1.0), kind="stable")
    taken = order[np.cumsum(sizes[order]) <= rules.candidates]
    if not len(taken) and rules.candidates:
        taken = order[:1]
    return np.flatnonzero(inside | np.isin(rules.labels, taken[sizes[taken] > 0]))


def _holds(known: Indices, wanted: Indices) -> bool:
    return bool(np.isin(wanted, known).all())


def quadratic_model(search: Search, rules: Rules) -> tuple[SubsetModel, Indices]:
    """Return the model at the accepted point, and the labels of its units."""
    units, always, names = rules.places(search.known)
    curvature = symmetric(search.curvature, rules.ridge[search.known] * search.rows)
    target = curvature @ search.coefficients[search.known] - search.gradient[search.known]
    return SubsetModel(curvature, target, units, always), names


def _named(support: Mask, rules: Rules, names: Indices) -> Units:
    labels = np.unique(rules.labels[support & (rules.labels >= 0)])
    return tuple(np.searchsorted(names, labels).tolist())


def _forbidden(refused: Indices, names: Indices) -> frozenset[Units]:
    supports = set()
    for row in refused:
        labels = row[row >= 0]
        if np.isin(labels, names).all():
            supports.add(tuple(np.searchsorted(names, labels).tolist()))
    return frozenset(supports)


def symmetric(packed: Array, ridge: Array) -> Array:
    """Return a symmetric matrix from its upper triangle, with the ridge on its diagonal."""
    size = len(ridge)
    full = np.zeros((size, size))
    full[np.triu_indices(size)] = packed
    full = full + np.triu(full, 1).T
    full[np.arange(size), np.arange(size)] += ridge
    return full
