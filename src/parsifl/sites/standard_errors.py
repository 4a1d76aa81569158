"""Covariances of the coefficients: from the information, from scores of rows, or of sites."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import numpy as np
from scipy import stats

from parsifl.core.errors import ConfigError, unknown
from parsifl.sites.estimators.exact import ExactFit
from parsifl.sites.estimators.moments import Array
from parsifl.sites.search.best_subset import quadratic_model

Errors = Literal["auto", "model", "robust", "HC0", "dispersion", "cluster"]
_DEPENDENT, _DUST = 1e-12, 1e-6
_ROUNDED = 2e-14
"""The smallest eigenvalue of correlations that is not a rounding error."""


def dispersion(fit: ExactFit, family: str) -> float:
    """Return the variance of the noise for a squared loss, 1 for the other families.

    It is in the scale of the sums, whose weights are 1 on average.
    """
    if family != "gaussian":
        return 1.0
    scale = fit.weight_scale if fit.weight_type == "frequency" else 1.0
    free = observations(fit) - degrees_of_freedom(fit, family)
    return 2 * scale * float(fit.losses.sum()) / free if free > 0 else float("nan")


def observations(fit: ExactFit) -> float:
    """Return the number of rows, or the sum of frequency weights."""
    scale = fit.weight_scale if fit.weight_type == "frequency" else 1.0
    return scale * float(fit.rows.sum())


def information_scale(fit: ExactFit, family: str) -> float:
    """Return the factor from the sums to the information that the weights stand for."""
    if fit.weight_type == "frequency" or (fit.weight_type == "precision" and family != "gaussian"):
        return fit.weight_scale
    return 1.0


def degrees_of_freedom(fit: ExactFit, family: str) -> int:
    """Return the number of coefficients, including intercepts (one per site, if own)."""
    extra = 0
    if fit.own_intercepts or fit.centred == "client":
        extra = len(fit.rows)
    elif fit.centred == "global":
        extra = 1
    return len(fit.columns) + (extra if family != "cox" else 0)


def removals(fit: ExactFit, family: str) -> list[tuple[int, int, float]]:
    """Return label, number of coefficients, and rise of the deviance without it, of each term.

    The rise follows from the quadratic model at the solution; of a linear regression it is in
    units of the residual variance.
    """
    selected = np.unique(fit.rules.labels[fit.search.support & (fit.rules.labels >= 0)])
    if not len(selected) or not np.isin(fit.columns, fit.search.known).all():
        return []
    model, names = quadratic_model(fit.search, fit.rules)
    here = tuple(np.searchsorted(names, selected).tolist())
    costs = model.costs(model.fit(here), here)
    sizes = [int((fit.rules.labels == label).sum()) for label in selected]
    noise = dispersion(fit, family)
    return [
        (int(label), size, float(2 * cost / noise))
        for label, size, cost in zip(selected, sizes, costs, strict=True)
    ]


def undetermined(fit: ExactFit) -> Array:
    """Return a basis [coefficients, directions] of what the rows do not determine.

    It is empty unless columns of the model depend linearly on each other. Directions are exactly 0
    in the coefficients that are determined.
    """
    return null_space(_with_ridge(fit))


def dependence(fit: ExactFit) -> str:
    """Return how the undetermined columns are related, as the predicate of a sentence."""
    hessian = _with_ridge(fit)
    least = float(np.linalg.eigvalsh(_correlations(hessian)[0])[0])
    if least > _ROUNDED:
        return "are nearly equal, or nearly dependent, and not decidable at this precision"
    return "depend linearly on each other"


def _with_ridge(fit: ExactFit) -> Array:
    ridge = np.diag(fit.rules.ridge[fit.columns] * fit.rows.sum())
    return np.asarray(fit.information.sum(0) + ridge)


def _correlations(information: Array) -> tuple[Array, Array]:
    size = np.sqrt(np.maximum(np.diag(information), 0.0))
    size = np.where(size > 0, size, 1.0)
    return information / np.outer(size, size), size


def null_space(information: Array) -> Array:
    """Return a basis [coefficients, directions] of the directions without information."""
    inner, size = _correlations(information)
    values, vectors = np.linalg.eigh(inner)
    free = vectors[:, values <= _DEPENDENT]
    return np.asarray(np.where(np.abs(free) > _DUST, free, 0.0) / size[:, None])


def moves(to_units: Array, directions: Array) -> Any:
    """Return which coefficients, in the units of X, the directions change."""
    change = np.abs(to_units @ directions)
    return (change > _DUST * (np.abs(to_units) @ np.abs(directions))).any(axis=1)


def covariance(fit: ExactFit, family: str, errors: Errors = "auto") -> tuple[Array, Any]:
    """Return the covariance of the coefficients in standardised units, and their distribution.

    An intercept that follows from the means is the last coefficient.
    """
    if errors not in get_args(Errors):
        raise ConfigError(unknown("se", str(errors), get_args(Errors)))
    kind = resolved(fit, errors)
    hessian, bread = _bread(fit)
    n, p = observations(fit), degrees_of_freedom(fit, family)
    free = max(n - p, 1)
    law: Any = stats.t(free) if family == "gaussian" else stats.norm()
    scale = information_scale(fit, family)
    if kind == "model":
        # frequency weights of a squared loss are in its dispersion
        noise = dispersion(fit, family) if family == "gaussian" else 1 / scale
        if fit.weight_type == "frequency" and family == "gaussian":
            noise = noise / scale
        return noise * bread @ hessian @ bread, law
    if kind == "dispersion":
        return pearson_dispersion(fit, family) / scale * bread @ hessian @ bread, stats.t(free)
    if kind == "cluster":
        gradients = _gradients(fit)
        sites = int((fit.rows > 0).sum())
        if sites < 2:
            raise ConfigError("se='cluster' needs at least 2 sites")
        factor = sites / (sites - 1) * ((n - 1) / free if family != "cox" else 1.0)
        return factor * bread @ (gradients.T @ gradients) @ bread, stats.t(sites - 1)
    if fit.by_site is None or not fit.by_site.outer.size:
        raise ConfigError(f"se={errors!r} needs sums that the sites of a deployment do not send")
    if fit.weight_type == "frequency":
        raise ConfigError(
            f"se={errors!r} treats a row as one observation; with weight_type='frequency' repeat "
            "the rows instead, or set weight_type='sampling'"
        )
    factor = n / free if kind == "robust" and family != "cox" else 1.0
    return factor * bread @ fit.by_site.outer.sum(0) @ bread, law


def pearson_dispersion(fit: ExactFit, family: str) -> float:
    """Return Pearson's chi-squared statistic over its degrees of freedom."""
    if family == "cox":
        raise ConfigError("se='dispersion' is not defined for Cox regression")
    if fit.by_site is None or np.isnan(fit.by_site.pearson).any():
        raise ConfigError("se='dispersion' needs sums that the sites of a deployment do not send")
    free = observations(fit) - degrees_of_freedom(fit, family)
    scale = information_scale(fit, family)
    return scale * float(fit.by_site.pearson.sum()) / free if free > 0 else float("nan")


def resolved(fit: ExactFit, errors: Errors) -> Errors:
    """Return the kind of errors; the weights of a sample call for robust ones."""
    if errors == "auto":
        return "robust" if fit.weight_type == "sampling" else "model"
    return cast("Errors", errors)


def _bread(fit: ExactFit) -> tuple[Array, Array]:
    """Return the information, and the inverse of it with the ridge."""
    penalty = fit.rules.ridge[fit.columns] * fit.rows.sum()
    if fit.by_site is not None:
        hessian = fit.by_site.information.sum(0)
    else:
        hessian = fit.information.sum(0)
        if fit.centred == "global":  # orthogonal to the centred columns
            hessian = np.pad(hessian, (0, 1))
            hessian[-1, -1] = fit.rows.sum()
    penalty = np.pad(penalty, (0, len(hessian) - len(penalty)))
    return hessian, np.linalg.pinv(hessian + np.diag(penalty), rcond=1e-14, hermitian=True)


def _gradients(fit: ExactFit) -> Array:
    if fit.by_site is not None:
        return fit.by_site.gradients
    if fit.centred == "global":
        raise ConfigError("se='cluster' needs sums that the sites of a deployment do not send")
    return fit.gradients
