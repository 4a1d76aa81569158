"""Standard errors, intervals and differences between sites, and when they are valid.

The observed information, summed over sites, gives standard errors for a model that was *fixed in
advance*. If the same rows selected the columns, such intervals are too short. Valid ones come from
rows that took no part in the selection (`split_inference`), or for one exposure from
`post_double_selection`. `stability_selection` measures how stable the selection is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn.base import clone
from sklearn.utils import _safe_indexing, check_array, check_consistent_length

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.data.tables import as_columns, is_table
from parsifl.sites.estimators.exact import ExactFit, SubsetPath
from parsifl.sites.estimators.moments import Array, Indices
from parsifl.sites.estimators.preprocessor import owners
from parsifl.sites.estimators.settings import whole

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
_DEPENDENT, _DUST = 1e-12, 1e-6


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


@dataclass(frozen=True, eq=False)
class Inference:
    """A table of coefficients in the units of X; NaN where no valid value exists.

    Attributes
    ----------
    names, estimate, se, lower, upper, statistic, pvalue
        One entry for each coefficient; the intercept, if there is a common one, comes first.
    sites, site_estimates, site_se
        Names, estimates [sites, coefficients] and their standard errors, by one Newton step from
        the common ones on the rows of the site alone (least squares, for a squared loss).
    q, q_pvalue, i2
        Cochran's Q of the sites' estimates, its p-value, and the fraction I^2 of their variation
        that is not due to chance.
    guarantee
        When the intervals hold.
    level
        The level of the intervals.
    """

    names: list[str]
    estimate: Array
    se: Array
    lower: Array
    upper: Array
    statistic: Array
    pvalue: Array
    sites: list[str]
    site_estimates: Array
    site_se: Array
    q: Array
    q_pvalue: Array
    i2: Array
    guarantee: str
    level: float

    def cells(self) -> list[list[str]]:
        """Return the table as text, its heading first."""
        rows = [["", "estimate", "SE", f"{self.level:.0%} CI", "statistic", "p", "Q", "I2"]]
        rows[0] += [f"site {site}" for site in self.sites]
        for i, name in enumerate(self.names):
            interval = "" if np.isnan(self.se[i]) else f"[{self.lower[i]:.4g}, {self.upper[i]:.4g}]"
            row = [name, _text(self.estimate[i]), _text(self.se[i]), interval]
            row += [_text(self.statistic[i], 3), _text(self.pvalue[i], 2), _text(self.q[i], 3)]
            row.append("" if np.isnan(self.i2[i]) else f"{self.i2[i]:.0%}")
            rows.append([*row, *(_text(value) for value in self.site_estimates[:, i])])
        return rows

    def __str__(self) -> str:
        rows = self.cells()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.guarantee])


def _text(value: float, digits: int = 4) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}g}"


def was_selected(fit: ExactFit) -> bool:
    """Return whether the rows of the fit selected terms."""
    return 0 < fit.rules.count < int(fit.rules.labels.max()) + 1


def dispersion(fit: ExactFit, family: str) -> float:
    """Return the variance of the noise for a squared loss, 1 for the other families."""
    if family != "gaussian":
        return 1.0
    free = float(fit.rows.sum()) - degrees_of_freedom(fit, family)
    return 2 * float(fit.losses.sum()) / free if free > 0 else float("nan")


def degrees_of_freedom(fit: ExactFit, family: str) -> int:
    """Return the number of coefficients, including intercepts (one per site, if own)."""
    extra = 0
    if fit.own_intercepts or fit.centred == "client":
        extra = len(fit.rows)
    elif fit.centred == "global":
        extra = 1
    return len(fit.columns) + (extra if family != "cox" else 0)


def covariance(fit: ExactFit, family: str) -> Array:
    """Return the covariance of the coefficients at `fit.columns`, in standardised units."""
    bend = fit.information.sum(0)
    ridge = np.diag(fit.rules.ridge[fit.columns] * fit.rows.sum())
    bread = np.linalg.pinv(bend + ridge, rcond=1e-14, hermitian=True)
    return np.asarray(dispersion(fit, family) * bread @ bend @ bread)


def undetermined(fit: ExactFit) -> Array:
    """Return a basis [coefficients, directions] of what the rows do not determine.

    It is empty unless columns of the model depend linearly on each other. Directions are exactly 0
    in the coefficients that are determined.
    """
    bend = fit.information.sum(0) + np.diag(fit.rules.ridge[fit.columns] * fit.rows.sum())
    size = np.sqrt(np.diag(bend))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(bend / np.outer(size, size))
    free = vectors[:, values <= _DEPENDENT]
    return np.asarray(np.where(np.abs(free) > _DUST, free, 0.0) / size[:, None])


def table(
    fit: ExactFit, columns: Columns, family: str, *, selected: bool, level: float = 0.95
) -> Inference:
    """Return the coefficients of a fit in the units of X, with errors if nothing was selected."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    to_units, names = _to_units(fit, columns)
    common, free_directions = covariance(fit, family), undetermined(fit)
    b = fit.search.coefficients[fit.columns]
    sites, spread = _site_estimates(fit, family)
    shift = 0.0
    if columns.implied_intercept:  # orthogonal to the centred columns
        noise = dispersion(fit, family) / float(fit.rows.sum())
        common = _bordered(common, noise)
        free_directions = np.pad(free_directions, ((0, 1), (0, 0)))
        b, shift = np.append(b, 0.0), columns.target
        sites = np.concatenate([sites, np.zeros((len(sites), 1))], axis=1)
        spread = np.stack([_bordered(part, 0.0) for part in spread])
    estimate = to_units @ b
    estimate[0] += shift
    se = np.sqrt(np.maximum(np.diag(to_units @ common @ to_units.T), 0.0))
    own = sites @ to_units.T
    errors = np.sqrt(np.maximum(np.einsum("ij,sjk,ik->si", to_units, spread, to_units), 0.0))
    if columns.implied_intercept:  # there is one for all sites, and none was estimated by site
        own[:, 0] = np.nan
    q, q_pvalue, i2 = _heterogeneity(own, errors)
    moved = np.abs(to_units @ free_directions) > _DUST * (
        np.abs(to_units) @ np.abs(free_directions)
    )
    dependent: npt.NDArray[np.bool_] = np.asarray(moved.any(axis=1))
    se = np.where(selected | dependent, np.nan, se)
    free = float(fit.rows.sum()) - degrees_of_freedom(fit, family)
    law: Any = stats.t(max(free, 1)) if family == "gaussian" else stats.norm()
    wide = law.ppf(0.5 + level / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = estimate / se
    return Inference(
        names=names,
        estimate=estimate,
        se=se,
        lower=estimate - wide * se,
        upper=estimate + wide * se,
        statistic=statistic,
        pvalue=2 * law.sf(np.abs(statistic)),
        sites=columns.sites if len(columns.sites) == len(fit.rows) else _numbers(fit),
        site_estimates=own,
        site_se=errors,
        q=q,
        q_pvalue=q_pvalue,
        i2=i2,
        guarantee=SELECTED if selected else FIXED + _without_errors(names, dependent),
        level=level,
    )


def _without_errors(names: list[str], dependent: npt.NDArray[np.bool_]) -> str:
    found = [name for name, depends in zip(names, dependent, strict=True) if depends]
    if not found:
        return ""
    return (
        f" The rows do not determine {', '.join(found)}: columns of the model depend linearly on "
        "each other, the estimates are those of least norm, and no standard errors are given."
    )


def _numbers(fit: ExactFit) -> list[str]:
    return [str(number) for number in range(len(fit.rows))]


def _bordered(matrix: Array, corner: float) -> Array:
    found = np.zeros((len(matrix) + 1, len(matrix) + 1))
    found[:-1, :-1], found[-1, -1] = matrix, corner
    return found


def _to_units(fit: ExactFit, columns: Columns) -> tuple[Array, list[str]]:
    """Return the matrix from (slopes, intercept) to (intercept, slopes) in the units of X."""
    features = len(columns.scale)
    slopes = fit.columns[fit.columns < features]
    scale, mean = columns.scale[slopes], columns.mean[slopes]
    names = [columns.names[place] for place in slopes]
    if not columns.implied_intercept and len(slopes) == len(fit.columns):
        return np.diag(1 / scale), names
    found = np.zeros((len(slopes) + 1, len(slopes) + 1))
    found[0, :-1], found[0, -1] = -mean / scale, 1.0
    found[1:, :-1] = np.diag(1 / scale)
    return found, ["(intercept)", *names]


def _site_estimates(fit: ExactFit, family: str) -> tuple[Array, Array]:
    """Return each site's own estimates by one Newton step, and their covariances."""
    b = fit.search.coefficients[fit.columns]
    noise, count = dispersion(fit, family), len(fit.columns)
    found = np.full((len(fit.rows), count), np.nan)
    spread = np.full((len(fit.rows), count, count), np.nan)
    for i, (bend, slope) in enumerate(zip(fit.information, fit.gradients, strict=True)):
        if count and np.linalg.matrix_rank(bend, hermitian=True) == count:
            found[i] = b - np.linalg.solve(bend, slope)
            spread[i] = noise * np.linalg.inv(bend)
    return found, spread


def _heterogeneity(own: Array, errors: Array) -> tuple[Array, Array, Array]:
    usable = np.isfinite(own) & np.isfinite(errors) & (errors > 0)
    weight = np.where(usable, 1 / np.where(usable, errors, 1.0) ** 2, 0.0)
    values = np.where(usable, own, 0.0)
    total = weight.sum(0)
    mean = (weight * values).sum(0) / np.where(total > 0, total, 1.0)
    q = (weight * (values - mean) ** 2).sum(0)
    free = usable.sum(0) - 1
    q = np.where(free > 0, q, np.nan)
    i2 = np.where(q > 0, np.maximum(1 - free / np.where(q > 0, q, 1.0), 0.0), q)
    return q, np.where(free > 0, stats.chi2.sf(q, np.maximum(free, 1)), np.nan), i2


def information_criteria(fit: ExactFit, family: str, gamma: float = 1.0) -> dict[str, float]:
    """Return the log-likelihood and the information criteria.

    EBIC is that of Chen and Chen (2008), GIC the one that abess uses: log log n log p for each
    coefficient.
    """
    n, loss = float(fit.rows.sum()), float(fit.losses.sum())
    likelihood = _gaussian(n, loss) if family == "gaussian" else -loss - fit.constant
    free = fit.rules.labels >= 0
    chosen = len(np.unique(fit.rules.labels[fit.search.support & free]))
    return _criteria(fit, likelihood, degrees_of_freedom(fit, family), chosen, gamma)


def path_criteria(fit: ExactFit, path: SubsetPath) -> list[dict[str, float]]:
    """Return the same for every number of terms of a linear regression without a ridge."""
    n, extra = float(fit.rows.sum()), degrees_of_freedom(fit, "gaussian") - len(fit.columns)
    return [
        _criteria(fit, _gaussian(n, loss), int(np.count_nonzero(slopes)) + extra, number, 1.0)
        for number, slopes, loss in zip(
            path.numbers.tolist(), path.coefficients, path.losses.tolist(), strict=True
        )
    ]


def _gaussian(n: float, loss: float) -> float:
    return -n / 2 * (math.log(2 * math.pi * max(2 * loss, 1e-300) / n) + 1)


def _criteria(
    fit: ExactFit, likelihood: float, count: int, chosen: int, gamma: float
) -> dict[str, float]:
    n, units = float(fit.rows.sum()), max(int(fit.rules.labels.max(initial=-1)) + 1, 0)
    ways = math.lgamma(units + 1) - math.lgamma(chosen + 1) - math.lgamma(units - chosen + 1)
    bic = -2 * likelihood + count * math.log(n)
    return {
        "log_likelihood": likelihood,
        "aic": -2 * likelihood + 2 * count,
        "bic": bic,
        "ebic": bic + 2 * gamma * ways,
        "gic": -2 * likelihood
        + chosen * math.log(max(units, 2)) * math.log(max(math.log(n), math.e)),
    }


def split_inference(
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any = None,
    *,
    sample_weight: Any = None,
    fraction: float = 0.5,
    level: float = 0.95,
    seed: int = 0,
) -> Inference:
    """Select the columns on some rows of every site, and estimate on the others.

    Parameters
    ----------
    estimator
        A sparse estimator; it is cloned.
    fraction
        The fraction of a site's rows used for selection.
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
    data = X if is_table(X) else check_array(X, accept_sparse="csr", dtype=np.float64)
    target = np.asarray(y)
    first = _half(groups, len(target), fraction, seed)
    chosen = _fitted(clone(estimator), data, target, groups, sample_weight, first)
    keep = chosen.selected()
    if not keep:
        raise ValueError("no column was selected: there is nothing to estimate")
    fixed = clone(estimator).set_params(n_nonzero_coefs=0, keep=keep, solver="exact")
    model = _fitted(fixed, data, target, groups, sample_weight, ~first)
    found: Inference = replace(model.summary(level=level), guarantee=SPLIT)
    return found


def post_double_selection(
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any = None,
    *,
    exposure: int | str,
    sample_weight: Any = None,
    level: float = 0.95,
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
    """
    if getattr(estimator, "_family", lambda: "")() != "gaussian":
        raise ValueError("post_double_selection needs a FederatedSparseRegressor")
    target, every = np.asarray(y, dtype=np.float64), np.ones(len(y), np.bool_)
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
        model = _fitted(clone(estimator), rest, aim, groups, sample_weight, every)
        found = model.selected()
        keep |= set(found if is_table(data) else (others[place] for place in found))
    fixed = clone(estimator).set_params(
        n_nonzero_coefs=0, keep=[name for name in columns if name in keep], solver="exact"
    )
    model = _fitted(fixed, data, target, groups, sample_weight, every)
    whole: Inference = model.summary(level=level)
    label = str(exposure) if is_table(data) else f"x{exposure}"
    place = [whole.names.index(label)]
    vectors = ("estimate", "se", "lower", "upper", "statistic", "pvalue", "q", "q_pvalue", "i2")
    parts: dict[str, Any] = {name: getattr(whole, name)[place] for name in vectors}
    return replace(
        whole,
        names=[label],
        site_estimates=whole.site_estimates[:, place],
        site_se=whole.site_se[:, place],
        guarantee=DOUBLE,
        **parts,
    )


def _fitted(
    model: Any, x: Any, y: Any, groups: Any, weight: Any, rows: np.ndarray[Any, Any]
) -> Any:
    inside = None if groups is None else np.asarray(groups)[rows]
    given = None if weight is None else np.asarray(weight)[rows]
    part = _safe_indexing(x, np.flatnonzero(rows))
    return model.fit(part, y[rows], groups=inside, sample_weight=given)


def _half(groups: Any, rows: int, fraction: float, seed: int) -> np.ndarray[Any, Any]:
    owner: Indices = np.zeros(rows, np.int64)
    if groups is not None:
        owner = np.unique(np.asarray(groups), return_inverse=True)[1]
    first = np.zeros(rows, np.bool_)
    for site in range(int(owner.max()) + 1):
        draw = Key(seed, client=site, purpose="split").numpy_generator()
        own = draw.permutation(np.flatnonzero(owner == site))
        first[own[: round(fraction * len(own))]] = True
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


def stability_selection(
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any,
    *,
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
    frequency = np.zeros(X.shape[1])
    for number in range(subsamples):
        rows = _subsample(owner, by, Key(seed, round=number, purpose="stability"))
        part = _safe_indexing(X, rows)
        chosen = clone(estimator).fit(part, y[rows], groups=owner[rows]).selected()
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
