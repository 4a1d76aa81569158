"""Standard errors, intervals and differences between sites, and when they are valid.

The observed information, summed over sites, gives standard errors for a model that was *fixed in
advance*. If the same rows selected the columns, such intervals are too short. Valid ones come from
rows that took no part in the selection (`split_inference`), or for one exposure from
`post_double_selection`. `stability_selection` measures how stable the selection is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sklearn.base import clone
from sklearn.utils import _safe_indexing, check_array, check_consistent_length

from parsifl.core.errors import ConfigError, ParsiflWarning
from parsifl.core.keys import Key
from parsifl.data.tables import as_columns, is_table
from parsifl.sites.estimators.exact import ExactFit, SubsetPath
from parsifl.sites.estimators.moments import Array, Indices
from parsifl.sites.estimators.preprocessor import owners
from parsifl.sites.estimators.settings import whole
from parsifl.sites.heterogeneity import heterogeneity, site_effects, site_estimates
from parsifl.sites.standard_errors import (
    Errors,
    covariance,
    degrees_of_freedom,
    dependence,
    information_scale,
    moves,
    observations,
    pearson_dispersion,
    resolved,
    undetermined,
)
from parsifl.sites.summary import Inference, SiteEffects

UNSELECTED = "No column was selected by these rows."
ADVANCE = "Intervals hold for a model that was fixed in advance."
FIXED = (
    "No column was selected by these rows: standard errors come from the observed information, and "
    "intervals hold for a model that was fixed in advance."
)
SELECTED = (
    "These rows selected the columns: standard errors, intervals and p-values would be too "
    "optimistic and are not given. Use split_inference (other rows of the same sites), "
    "post_double_selection (one exposure) or stability_selection."
)
SPLIT = (
    "The columns were selected on other rows of the same sites: given that choice, intervals and "
    "p-values hold for the coefficients of the chosen model."
)
DOUBLE = (
    "Post-double-selection: the controls were chosen once for the target and once for the "
    "exposure; the interval holds for the exposure's coefficient alone, if both models are sparse."
)
_CONDITIONS = {
    "robust": "Standard errors are robust (HC1): they hold if the variance of the noise differs "
    "between rows.",
    "HC0": "Standard errors are robust (HC0): they hold if the variance of the noise differs "
    "between rows.",
    "dispersion": "Standard errors are scaled by Pearson's dispersion, {dispersion:.3g}.",
    "cluster": "Standard errors are clustered by site: they hold if rows of a site depend on each "
    "other, for many sites.",
}
SPLITS = (
    "In each of {splits} random splits the columns were selected on some rows and tested on the "
    "others. The p-values are aggregated over splits and hold for all columns together; estimates "
    "are medians over the splits that selected the column. There are no intervals."
)
_FEW_CLUSTERS, _CERTAIN = 20, 0.05
_LEAST = 0.05
"""The smallest quantile of p-values over splits."""


@dataclass(frozen=True)
class Columns:
    """The transformation of coefficients from standardised units to those of X."""

    names: list[str]
    sites: list[str]
    mean: Array
    scale: Array
    implied_intercept: bool
    """Whether there is an intercept that follows from the means, besides those of the problem."""
    target: float = 0.0
    """The mean of the target, for such an intercept."""


def was_selected(fit: ExactFit) -> bool:
    """Return whether the rows of the fit selected terms."""
    return 0 < fit.rules.count < int(fit.rules.labels.max()) + 1


def table(
    fit: ExactFit,
    columns: Columns,
    family: str,
    *,
    selected: bool,
    level: float = 0.95,
    errors: Errors = "auto",
    notes: tuple[str, ...] = (),
) -> Inference:
    """Return the coefficients of a fit in the units of X, with errors if nothing was selected."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    to_units, names = _to_units(fit, columns)
    common, law = covariance(fit, family, errors)
    free_directions = undetermined(fit)
    b = fit.search.coefficients[fit.columns]
    shift = np.zeros(len(to_units))
    if columns.implied_intercept:
        free_directions = np.pad(free_directions, ((0, 1), (0, 0)))
        b, shift[0] = np.append(b, 0.0), columns.target
    estimate = to_units @ b + shift
    se = np.sqrt(np.maximum(np.diag(to_units @ common @ to_units.T), 0.0))
    dependent = moves(to_units, free_directions)
    se = np.where(selected | dependent, np.nan, se)
    by_site, site_se = site_estimates(fit, family, to_units)
    by_site = by_site + shift
    between = heterogeneity(by_site, site_se, level)
    effects = None if selected else site_effects(fit, family)
    wide = law.ppf(0.5 + level / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = estimate / se
    guarantee = SELECTED
    if not selected:
        guarantee = _guarantee(fit, family, errors) + _without_errors(fit, names, dependent)
    return Inference(
        names=names,
        estimate=estimate,
        se=se,
        lower=estimate - wide * se,
        upper=estimate + wide * se,
        statistic=statistic,
        pvalue=2 * law.sf(np.abs(statistic)),
        sites=columns.sites if len(columns.sites) == len(fit.rows) else _numbers(fit),
        site_estimates=by_site,
        site_se=site_se,
        site_effects=effects,
        guarantee=guarantee,
        notes=(*notes, *_on_sites(effects)),
        level=level,
        family=family,
        **vars(between),
    )


def _guarantee(fit: ExactFit, family: str, errors: Errors) -> str:
    """Return when the intervals of a model without selection hold."""
    kind = resolved(fit, errors)
    text = FIXED
    if kind != "model":
        number = pearson_dispersion(fit, family) if kind == "dispersion" else 0.0
        text = f"{UNSELECTED} {_CONDITIONS[kind].format(dispersion=number)} {ADVANCE}"
    sites = int((fit.rows > 0).sum())
    if kind == "cluster" and sites < _FEW_CLUSTERS:
        warnings.warn(
            f"se='cluster' with {sites} sites: standard errors are too small with fewer than "
            f"{_FEW_CLUSTERS} clusters, although t({sites - 1}) is used",
            ParsiflWarning,
            stacklevel=4,
        )
    if (fit.rules.ridge > 0).any():
        text += (
            " The ridge penalty (l2) shrinks the coefficients: intervals hold for the shrunken "
            "coefficients that the penalty aims at, not for those of the model. For these, fit "
            "again with l2=None and keep=selected()."
        )
    return text


def _on_sites(effects: SiteEffects | None) -> tuple[str, ...]:
    """Return a sentence on site effects that a common intercept ignores."""
    if effects is None or effects.pvalue > _CERTAIN:
        return ()
    return (
        f"Sites differ in level: {effects}. With a common intercept (center='global') intervals "
        "are too short if sites have effects of their own: in two simulations with random site "
        "intercepts 54 % and 76 % covered, and with center='client' 94 % and 95 %.",
    )


def _without_errors(fit: ExactFit, names: list[str], dependent: npt.NDArray[np.bool_]) -> str:
    lacking = [name for name, depends in zip(names, dependent, strict=True) if depends]
    if not lacking:
        return ""
    return (
        f" The rows do not determine {', '.join(lacking)}: columns of the model {dependence(fit)}, "
        "the estimates are those of least norm, and no standard errors are given."
    )


def _numbers(fit: ExactFit) -> list[str]:
    return [str(number) for number in range(len(fit.rows))]


def _to_units(fit: ExactFit, columns: Columns) -> tuple[Array, list[str]]:
    """Return the matrix from (slopes, intercept) to (intercept, slopes) in the units of X."""
    features = len(columns.scale)
    column_numbers = fit.columns[fit.columns < features]
    scale, mean = columns.scale[column_numbers], columns.mean[column_numbers]
    names = [columns.names[column] for column in column_numbers]
    if not columns.implied_intercept and len(column_numbers) == len(fit.columns):
        return np.diag(1 / scale), names
    matrix = np.zeros((len(column_numbers) + 1, len(column_numbers) + 1))
    matrix[0, :-1], matrix[0, -1] = -mean / scale, 1.0
    matrix[1:, :-1] = np.diag(1 / scale)
    return matrix, ["(intercept)", *names]


def information_criteria(fit: ExactFit, family: str, gamma: float = 1.0) -> dict[str, float]:
    """Return the log-likelihood and the information criteria.

    EBIC is that of Chen and Chen (2008), GIC the one that abess uses: log log n log p for each
    selected coefficient. A factor counts with all its coefficients; only the number of possible
    choices in EBIC is that of terms.
    """
    n, loss = observations(fit), float(fit.losses.sum())
    scale = information_scale(fit, family)
    likelihood = -scale * (loss + fit.constant)
    if family == "gaussian":
        likelihood = _gaussian(n, scale * loss) + fit.log_weights / 2
    free = fit.rules.labels >= 0
    selected = fit.rules.labels[fit.search.support & free]
    count, terms = degrees_of_freedom(fit, family), len(np.unique(selected))
    return _criteria(fit, likelihood, count, terms, len(selected), gamma)


def path_criteria(fit: ExactFit, path: SubsetPath) -> list[dict[str, float]]:
    """Return the same for every number of terms of a linear regression without a ridge."""
    n, extra = float(fit.rows.sum()), degrees_of_freedom(fit, "gaussian") - len(fit.columns)
    free, criteria = fit.rules.labels >= 0, []
    for number, coefficients, loss in zip(
        path.numbers.tolist(), path.coefficients, path.losses.tolist(), strict=True
    ):
        count, selected = (
            int(np.count_nonzero(coefficients)),
            int(np.count_nonzero(coefficients[free])),
        )
        likelihood = _gaussian(n, loss)
        criteria.append(_criteria(fit, likelihood, count + extra, number, selected, 1.0))
    return criteria


def _gaussian(n: float, loss: float) -> float:
    return -n / 2 * (math.log(2 * math.pi * max(2 * loss, 1e-300) / n) + 1)


def _criteria(
    fit: ExactFit, likelihood: float, count: int, terms: int, selected: int, gamma: float
) -> dict[str, float]:
    n, units = observations(fit), max(int(fit.rules.labels.max(initial=-1)) + 1, 0)
    ways = math.lgamma(units + 1) - math.lgamma(terms + 1) - math.lgamma(units - terms + 1)
    bic = -2 * likelihood + count * math.log(n)
    return {
        "log_likelihood": likelihood,
        "aic": -2 * likelihood + 2 * count,
        "bic": bic,
        "ebic": bic + 2 * gamma * ways,
        "gic": -2 * likelihood
        + selected * math.log(max(units, 2)) * math.log(max(math.log(n), math.e)),
    }


def split_inference(  # noqa: PLR0913 - every argument but three has a default
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any = None,
    *,
    sample_weight: Any = None,
    offset: Any = None,
    fraction: float = 0.5,
    splits: int = 1,
    level: float = 0.95,
    seed: int = 0,
) -> Inference:
    """Select the columns on some rows of every site, and estimate on the others.

    Parameters
    ----------
    estimator
        A sparse estimator, or one with cross-validation, which then also runs on these rows
        alone; it is cloned.
    offset
        The log of each row's exposure, for Poisson regression.
    fraction
        The fraction of a site's rows used for selection.
    splits
        How many random splits. One split depends on the seed. With several, p-values are those of
        Meinshausen, Meier and Bühlmann (2009), which hold for every column together with the
        other columns (family-wise); estimates are medians over the splits that selected the
        column, and there are no intervals. 50 splits are a common choice.
    level
        The level of the intervals.
    seed
        Determines which rows are used for selection.

    Examples
    --------
    >>> from parsifl.sites import FederatedSparseRegressor
    >>> draw = np.random.default_rng(0)
    >>> X = draw.standard_normal((80, 6))
    >>> y = X[:, 2] + 0.1 * draw.standard_normal(80)
    >>> found = split_inference(FederatedSparseRegressor(1), X, y, np.arange(80) % 4)
    >>> found.names, bool(found.lower[1] < 1 < found.upper[1])
    (['(intercept)', 'x2'], True)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction!r}")
    if not whole(splits) or splits < 1:
        raise ConfigError(f"splits must be a whole number of at least 1, got {splits!r}")
    data = X if is_table(X) else check_array(X, accept_sparse="csr", dtype=np.float64)
    target = np.asarray(y)
    extra = _extra(sample_weight=sample_weight, offset=offset)
    tables: list[Inference] = []
    for number in range(splits):
        key = Key(seed, round=number, purpose="split")
        first = _half(groups, len(target), fraction, key)
        chosen = _fitted(_interim(estimator), data, target, groups, extra, first)
        keep = chosen.selected()
        if not keep and splits == 1:
            raise ValueError("no column was selected: there is nothing to estimate")
        if keep:
            fixed = _fixed(estimator, keep)
            tables.append(_fitted(fixed, data, target, groups, extra, ~first).summary(level=level))
    if not tables:
        raise ValueError(f"no column was selected in any of {splits} splits")
    if splits > 1:
        return _over_splits(tables, splits)
    return replace(tables[0], guarantee=SPLIT)


def _fixed(estimator: Any, keep: list[Any]) -> Any:
    """Return an estimator of a model that is fixed, without cross-validation or ridge."""
    base = estimator._base() if hasattr(estimator, "_base") else estimator
    return clone(base).set_params(n_nonzero_coefs=0, keep=keep, solver="exact", l2=None)


def _over_splits(tables: list[Inference], splits: int) -> Inference:
    """Return the median estimates and aggregated p-values of several splits."""
    names = sorted({name for table in tables for name in table.names})
    names.sort(key=lambda name: -sum(name in table.names for table in tables))
    estimates = np.full((splits, len(names)), np.nan)
    pvalues = np.ones((splits, len(names)))
    for row, each in enumerate(tables):
        positions = [names.index(name) for name in each.names]
        estimates[row, positions] = each.estimate
        tested = sum(name != "(intercept)" for name in each.names)
        pvalues[row, positions] = np.minimum(np.nan_to_num(each.pvalue, nan=1.0) * tested, 1.0)
    first, none = tables[0], np.full(len(names), np.nan)
    fields = ("se", "lower", "upper", "statistic", "q", "q_pvalue", "i2", "tau2")
    random = ("random_estimate", "random_se", "random_lower", "random_upper")
    empty: dict[str, Any] = dict.fromkeys((*fields, *random), none)
    return replace(
        first,
        names=names,
        estimate=np.nanmedian(estimates, axis=0),
        pvalue=np.array([aggregated(values) for values in pvalues.T]),
        frequency=np.isfinite(estimates).mean(axis=0),
        sites=[],
        site_estimates=np.zeros((0, len(names))),
        site_se=np.zeros((0, len(names))),
        site_effects=None,
        guarantee=SPLITS.format(splits=splits),
        notes=(),
        **empty,
    )


def aggregated(pvalues: Array) -> float:
    """Return one p-value for those of several splits, by quantiles.

    Meinshausen, Meier and Bühlmann (2009), with the smallest quantile 0.05.

    >>> round(aggregated(np.full(50, 0.001)), 6)
    0.003996
    """
    ordered = np.sort(pvalues)
    ranks = np.arange(1, len(ordered) + 1) / len(ordered)
    # the infimum over quantiles is at one of the p-values, or at the smallest quantile
    usable = ranks >= _LEAST
    candidates = ordered[usable] / ranks[usable]
    at_least = ordered[max(math.ceil(_LEAST * len(ordered)) - 1, 0)] / _LEAST
    smallest = min(float(candidates.min()), float(at_least))
    return min(1.0, (1 - math.log(_LEAST)) * smallest)


def post_double_selection(
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any = None,
    *,
    exposure: int | str,
    sample_weight: Any = None,
    level: float = 0.95,
    se: Errors = "robust",
) -> Inference:
    """Estimate the coefficient of one exposure, with controls chosen for target and exposure.

    Belloni, Chernozhukov and Hansen (2014), with best subsets instead of the lasso: columns
    that predict `y` and columns that predict the exposure are both kept. For linear regression.

    Parameters
    ----------
    estimator
        A `FederatedSparseRegressor`; its `n_nonzero_coefs` counts the controls of each selection.
    exposure
        The exposure among the columns of X: its position, or its name in a table. It must be a
        number in every row.
    se
        The kind of standard error, as in `summary`; as in the paper, robust by default.
    """
    if getattr(estimator, "_family", lambda: "")() != "gaussian":
        raise ValueError("post_double_selection needs a FederatedSparseRegressor")
    target, every = np.asarray(y, dtype=np.float64), np.ones(len(y), np.bool_)
    extra = _extra(sample_weight=sample_weight)
    if is_table(X):
        data, columns = X, list(X.columns)
        if exposure not in columns:
            raise ValueError(f"exposure must be a column of X, got {exposure!r}")
        treated = as_columns(X[[exposure]])[str(exposure)]
    else:
        data = check_array(X, dtype=np.float64)
        columns = list(range(data.shape[1]))
        if exposure not in columns:
            raise ValueError(f"exposure must be a column of X, 0 .. {data.shape[1] - 1}")
        treated = data[:, exposure]
    others = [name for name in columns if name != exposure]
    rest = data[others] if is_table(data) else data[:, others]
    keep = {exposure}
    for aim in (target, treated):
        model = _fitted(_interim(estimator), rest, aim, groups, extra, every)
        selected = model.selected()
        keep |= set(selected if is_table(data) else (others[column] for column in selected))
    fixed = _fixed(estimator, [name for name in columns if name in keep])
    model = _fitted(fixed, data, target, groups, extra, every)
    table: Inference = model.summary(level=level, se=se)
    label = str(exposure) if is_table(data) else f"x{exposure}"
    column = [table.names.index(label)]
    return replace(table.of(column), names=[label], guarantee=DOUBLE)


def _extra(**arrays: Any) -> dict[str, Any]:
    """Return the arrays of `fit` that were given."""
    return {name: np.asarray(values) for name, values in arrays.items() if values is not None}


def _interim(estimator: Any) -> Any:
    """Return a clone whose fit only selects."""
    model = clone(estimator)
    model._interim = True
    return model


def _fitted(
    model: Any,
    x: Any,
    y: Any,
    groups: Any,
    extra: Mapping[str, Any],
    rows: np.ndarray[Any, Any],
) -> Any:
    inside = None if groups is None else np.asarray(groups)[rows]
    more = {name: values[rows] for name, values in extra.items()}
    return model.fit(_safe_indexing(x, np.flatnonzero(rows)), y[rows], groups=inside, **more)


def _half(groups: Any, rows: int, fraction: float, key: Key) -> np.ndarray[Any, Any]:
    owner: Indices = np.zeros(rows, np.int64)
    if groups is not None:
        owner = np.unique(np.asarray(groups), return_inverse=True)[1]
    first = np.zeros(rows, np.bool_)
    for site in range(int(owner.max()) + 1):
        draw = replace(key, client=site).numpy_generator()
        site_rows = draw.permutation(np.flatnonzero(owner == site))
        first[site_rows[: round(fraction * len(site_rows))]] = True
    if first.all() or not first.any():
        largest = int(np.bincount(owner).max())
        raise ValueError(
            f"fraction={fraction:g} of sites with at most {largest} "
            f"row{'s' * (largest > 1)} leaves no row to {'estimate' if first.any() else 'select'} "
            "on: sites with one row cannot be split. Pass groups=None if sites have no effects, or "
            "use stability_selection(by='clients')"
        )
    return first


@dataclass(frozen=True)
class Stability:
    """The outcome of stability selection.

    Attributes
    ----------
    frequency
        How often each feature was selected.
    support
        The features that were selected at least as often as the threshold.
    selected
        The mean number of features in a subsample's model, q.
    false_bound
        q^2 / ((2 threshold - 1) p): a bound on the expected number of false selections, valid if
        false features are exchangeable and the method is no worse than guessing (Meinshausen and
        Bühlmann, 2010). It is not a p-value.
    names
        The columns of a table, or their positions as text.
    threshold
        The minimum fraction of subsamples.
    """

    frequency: npt.NDArray[np.float64]
    support: npt.NDArray[np.int64]
    selected: float
    false_bound: float
    names: list[str]
    threshold: float


def stability_selection(  # noqa: PLR0913 - every argument but four has a default
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any,
    *,
    sample_weight: Any = None,
    offset: Any = None,
    subsamples: int = 50,
    threshold: float = 0.7,
    by: Literal["clients", "rows"] = "clients",
    seed: int = 0,
) -> Stability:
    """Fit an estimator to many halves of the federation and count how often features are selected.

    Parameters
    ----------
    estimator
        An estimator of this package; it is cloned.
    offset
        The log of each row's exposure, for Poisson regression.
    by
        A subsample is half of the "clients", or half of the "rows" of every client.
    threshold
        Above one half.
    """
    _check_settings(subsamples, threshold, by, seed)
    X = X if is_table(X) else check_array(X, accept_sparse="csr", dtype=np.float64)
    names = [str(name) for name in getattr(X, "columns", range(X.shape[1]))]
    y, count = np.asarray(y), 0
    check_consistent_length(X, y, groups)
    owner = owners(groups, len(y))[1]
    if by == "clients" and owner.max() < 1:
        raise ConfigError("by='clients' needs at least 2 clients: use by='rows'")
    if getattr(estimator, "dictionary", None) is not None:
        raise ConfigError(
            "stability selection counts features, but with a dictionary every feature has a "
            "coefficient: pass X @ dictionary to an estimator without one"
        )
    frequency, extra = np.zeros(X.shape[1]), _extra(sample_weight=sample_weight, offset=offset)
    for number in range(subsamples):
        rows = np.zeros(len(y), np.bool_)
        rows[_subsample(owner, by, Key(seed, round=number, purpose="stability"))] = True
        chosen = _fitted(_interim(estimator), X, y, owner, extra, rows).selected()
        frequency[[names.index(str(column)) for column in chosen]] += 1
        count += len(chosen)
    frequency /= subsamples
    selected = count / subsamples
    bound = selected**2 / ((2 * threshold - 1) * X.shape[1])
    support = np.flatnonzero(frequency >= threshold)
    return Stability(frequency, support, selected, bound, names, threshold)


def _check_settings(subsamples: Any, threshold: Any, by: str, seed: Any) -> None:
    if not isinstance(threshold, float | int) or not 0.5 < threshold <= 1:
        raise ConfigError(f"threshold must be above 0.5 and at most 1, got {threshold!r}")
    for name, number, least in (("subsamples", subsamples, 1), ("seed", seed, 0)):
        if not whole(number) or number < least:
            raise ConfigError(f"{name} must be a whole number and at least {least}, got {number!r}")
    if by not in ("clients", "rows"):
        raise ConfigError(f"by must be 'clients' or 'rows', got {by!r}")


def _subsample(owner: npt.NDArray[np.int64], by: str, key: Key) -> npt.NDArray[np.int64]:
    draw = key.numpy_generator()
    clients = int(owner.max()) + 1
    if by == "clients":
        chosen = draw.permutation(clients)[: max(clients // 2, 1)]
        return np.flatnonzero(np.isin(owner, chosen))
    parts = [draw.permutation(np.flatnonzero(owner == client)) for client in range(clients)]
    return np.sort(np.concatenate([part[: max(len(part) // 2, 1)] for part in parts]))
