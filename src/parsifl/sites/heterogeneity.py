"""Differences between sites: their estimates, Q, random effects, and a test of site intercepts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from parsifl.sites.estimators.exact import ExactFit
from parsifl.sites.estimators.moments import Array
from parsifl.sites.standard_errors import (
    degrees_of_freedom,
    dispersion,
    information_scale,
    moves,
    null_space,
    observations,
)
from parsifl.sites.summary import SiteEffects


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    """Fields of `Inference` about the variation of one coefficient between sites."""

    q: Array
    q_pvalue: Array
    i2: Array
    tau2: Array
    random_estimate: Array
    random_se: Array
    random_lower: Array
    random_upper: Array


def site_estimates(fit: ExactFit, family: str, to_units: Array) -> tuple[Array, Array]:
    """Return each site's estimates and their standard errors, in the units of X."""
    sites, count = len(fit.rows), len(to_units)
    estimates, errors = np.full((sites, count), np.nan), np.full((sites, count), np.nan)
    for site in range(sites):
        b, spread, free = _of_site(fit, family, site)
        undecided = moves(to_units, free) | ((to_units != 0) @ np.isnan(b))
        estimates[site] = np.where(undecided, np.nan, to_units @ np.nan_to_num(b))
        variance = np.einsum("ij,jk,ik->i", to_units, np.nan_to_num(spread), to_units)
        unknown = undecided | ((to_units != 0) @ np.isnan(np.diag(spread)))
        errors[site] = np.where(unknown, np.nan, np.sqrt(np.maximum(variance, 0.0)))
    return estimates, errors


def _of_site(fit: ExactFit, family: str, site: int) -> tuple[Array, Array, Array]:
    """Return a site's estimate, its covariance, and what its rows do not determine."""
    fits = fit.by_site
    if fits is None:
        return _one_step(fit, family, site)
    information = fits.site_information[site]
    bread = np.linalg.pinv(information, rcond=1e-12, hermitian=True)
    p = len(information) + (fits.intercept == "own")
    n = float(fits.counts[site])
    scale = information_scale(fit, family)
    if fit.weight_type == "frequency":
        n = scale * float(fit.rows[site])
    noise = 1 / scale
    if family == "gaussian":
        noise = 2 * float(fits.site_losses[site]) / (n - p) if n > p else np.nan
    spread = noise * bread
    if fit.weight_type == "sampling" and len(fits.site_outer):
        factor = n / (n - p) if n > p and family != "cox" else 1.0
        spread = factor * bread @ fits.site_outer[site] @ bread
    return fits.estimates[site], spread, null_space(information)


def _one_step(fit: ExactFit, family: str, site: int) -> tuple[Array, Array, Array]:
    """Return one Newton step from the common coefficients, for sums of a deployment."""
    hessian, gradient = fit.information[site], fit.gradients[site]
    bread = np.linalg.pinv(hessian, rcond=1e-12, hermitian=True)
    b = fit.search.coefficients[fit.columns] - bread @ gradient
    spread, free = dispersion(fit, family) * bread, null_space(hessian)
    if fit.centred == "global":  # the intercept follows from the means of all sites
        b, free = np.append(b, np.nan), np.pad(free, ((0, 1), (0, 0)))
        spread = np.pad(spread, (0, 1), constant_values=np.nan)
    return b, spread, free


def heterogeneity(estimates: Array, errors: Array, level: float) -> Heterogeneity:
    """Return Cochran's Q, I^2, and the random-effects mean of DerSimonian and Laird.

    The standard error and the interval of the mean are those of Hartung and Knapp.
    """
    usable = np.isfinite(estimates) & np.isfinite(errors) & (errors > 0)
    variance = np.where(usable, errors, 1.0) ** 2
    values = np.where(usable, estimates, 0.0)
    count = usable.sum(0)
    several, free = count > 1, np.maximum(count - 1, 1)
    weight = np.where(usable, 1 / variance, 0.0)
    q, _ = _spread(values, weight)
    excess = weight.sum(0) - (weight**2).sum(0) / _positive(weight.sum(0))
    tau2 = np.maximum((q - free) / _positive(excess), 0.0)
    mixed = np.where(usable, 1 / (variance + tau2), 0.0)
    q_mixed, mean = _spread(values, mixed)
    se = np.sqrt(q_mixed / free / _positive(mixed.sum(0)))
    reach = stats.t(free).ppf(0.5 + level / 2) * se

    def known(numbers: Array) -> Array:
        return np.asarray(np.where(several, numbers, np.nan))

    i2 = np.where(q > 0, np.maximum(1 - free / _positive(q), 0.0), 0.0)
    return Heterogeneity(
        q=known(q),
        q_pvalue=known(stats.chi2.sf(q, free)),
        i2=known(i2),
        tau2=known(tau2),
        random_estimate=known(mean),
        random_se=known(se),
        random_lower=known(mean - reach),
        random_upper=known(mean + reach),
    )


def _spread(values: Array, weight: Array) -> tuple[Array, Array]:
    """Return the weighted sum of squares around the weighted mean, and this mean."""
    mean = (weight * values).sum(0) / _positive(weight.sum(0))
    return (weight * (values - mean) ** 2).sum(0), mean


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, 1.0)


def site_effects(fit: ExactFit, family: str) -> SiteEffects | None:
    """Test whether sites need their own intercepts, from sums at the fit with a common one."""
    fits = fit.by_site
    if fits is None or fits.intercept != "shared" or (fit.rules.ridge > 0).any():
        return None
    levels = fits.information[:, -1, -1]
    used = levels > 0
    more = int(used.sum()) - 1
    if more < 1:
        return None
    levels, scores = levels[used], fits.gradients[used]
    information = fits.information[used]
    cross = information[:, -1, :-1]
    inner = information[:, :-1, :-1].sum(0) - (cross / levels[:, None]).T @ cross
    right = scores[:, :-1].sum(0) - (scores[:, -1] / levels) @ cross
    drop = float((scores[:, -1] ** 2 / levels).sum())
    drop += float(right @ np.linalg.pinv(inner, rcond=1e-12, hermitian=True) @ right)
    if family != "gaussian":
        statistic = information_scale(fit, family) * drop
        return SiteEffects(statistic, (more,), float(stats.chi2.sf(statistic, more)))
    scale = fit.weight_scale if fit.weight_type == "frequency" else 1.0
    free = observations(fit) - degrees_of_freedom(fit, family) - more
    left = 2 * float(fit.losses.sum()) - drop
    if free <= 0 or left <= 0:
        return None
    statistic = scale * drop / more / (scale * left / free)
    return SiteEffects(statistic, (more, free), float(stats.f.sf(statistic, more, free)))
