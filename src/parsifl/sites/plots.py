"""Figures of fits with matplotlib (extra `parsifl[plots]`); every function returns the Axes.

Figures use the attributes of fitted estimators or rows in this process. Calibration, ROC and
survival curves need rows: use those of one site, or rows that may be pooled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score, roc_curve

from parsifl.core.errors import ConfigError
from parsifl.sites.estimators.cox import checked_times, two_columns
from parsifl.sites.estimators.moments import Array
from parsifl.sites.inference import Stability
from parsifl.sites.summary import Inference

__all__ = [
    "calibration_plot",
    "coefficient_path",
    "cv_curve",
    "forest_plot",
    "roc_plot",
    "stability_plot",
    "survival_plot",
]


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; install the extra: parsifl[plots]"
        ) from None
    return Figure(layout="constrained").subplots()  # no global state: nothing to close


def coefficient_path(
    estimator: Any, X: Any, y: Any, groups: Any = None, *, path: Any, ax: Any = None
) -> Any:
    """Draw the standardised coefficients of fits with growing numbers of terms.

    Parameters
    ----------
    estimator
        The estimator to clone and fit with each of these numbers.
    path
        Numbers of non-zero coefficients.
    """
    ax, values, names = _axes(ax), [], []
    for number in path:
        model = clone(estimator).set_params(n_nonzero_coefs=int(number)).fit(X, y, groups=groups)
        values.append(np.atleast_2d(model.coef_)[0] * model._columns.scale)
        names = list(model.get_feature_names_out())
    lines = np.array(values)
    for column in np.flatnonzero(lines.any(axis=0)):
        ax.plot(list(path), lines[:, column], marker="o", markersize=3, label=names[column])
    ax.axhline(0, color="grey", linewidth=0.5)
    ax.set(xlabel="terms", ylabel="coefficient x standard deviation")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize="small")
    return ax


def cv_curve(model: Any, ax: Any = None) -> Any:
    """Draw the error of each number of terms, with standard errors and the selected number.

    The model is a CV estimator, or the estimator of a deployed linear regression.
    """
    ax = _axes(ax)
    ax.errorbar(model.path_, model.mean_error_, yerr=model.standard_error_, marker="o", capsize=3)
    best = int(model.mean_error_.argmin())
    bound = model.mean_error_[best] + model.standard_error_[best]
    ax.axhline(bound, color="grey", linestyle=":", label="best + 1 SE")
    chosen = getattr(model, "n_nonzero_coefs_", getattr(model, "n_nonzero_coefs", None))
    label = f"chosen: {chosen} ({getattr(model, 'rule', 'as asked')})"
    ax.axvline(chosen, color="black", linestyle="--", label=label)
    ax.set(xlabel="terms", ylabel="error on sites left out")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize="small")
    return ax


def stability_plot(stability: Stability, ax: Any = None) -> Any:
    """Draw how often each column was selected, and the threshold."""
    ax = _axes(ax)
    order = np.argsort(stability.frequency)
    ax.barh([stability.names[column] for column in order], stability.frequency[order])
    label = f"threshold {stability.threshold:g}"
    ax.axvline(stability.threshold, color="black", linestyle="--", label=label)
    ax.set(xlabel="selected in this share of subsamples", xlim=(0, 1))
    ax.legend(fontsize="small")
    return ax


def forest_plot(table: Inference, name: str, ax: Any = None) -> Any:
    """Draw one coefficient at each site, and that of all sites together, with intervals."""
    if name not in table.names:
        raise ValueError(f"unknown coefficient {name!r}; known: {', '.join(table.names)}")
    ax, row = _axes(ax), table.names.index(name)
    estimates, errors = table.site_estimates[:, row], table.site_se[:, row]
    wide = 1.96 if np.isnan(table.se[row]) else _width(table, row)
    rows = [*table.sites, "all sites"]
    centre = np.append(estimates, table.estimate[row])
    half = wide * np.append(errors, table.se[row])
    heights = np.arange(len(rows))[::-1]
    ax.errorbar(centre, heights, xerr=np.nan_to_num(half), fmt="s", capsize=3)
    ax.set_yticks(heights, rows)
    ax.axvline(0, color="grey", linewidth=0.5)
    i2 = "" if np.isnan(table.i2[row]) else f" (I2 = {table.i2[row]:.0%})"
    ax.set(xlabel=f"coefficient of {name}{i2}")
    return ax


def _width(table: Inference, row: int) -> float:
    return float((table.upper[row] - table.lower[row]) / 2 / table.se[row])


def calibration_plot(model: Any, X: Any, y: Any, bins: int = 10, ax: Any = None) -> Any:
    """Draw observed against predicted fractions of the second class, in bins of equal size."""
    ax, truth = _axes(ax), np.asarray(y) == model.classes_[1]
    chance = model.predict_proba(X)[:, 1]
    seen, said = calibration_curve(truth, chance, n_bins=bins, strategy="quantile")
    ax.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    ax.plot(said, seen, marker="o")
    ax.set(xlabel=f"predicted share of {model.classes_[1]}", ylabel="observed share")
    return ax


def roc_plot(model: Any, X: Any, y: Any, ax: Any = None) -> Any:
    """Draw the ROC curve of the second class."""
    ax, truth = _axes(ax), np.asarray(y) == model.classes_[1]
    score = model.decision_function(X)
    false, true, _ = roc_curve(truth, score)
    ax.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    ax.plot(false, true, label=f"AUC {roc_auc_score(truth, score):.3f}")
    ax.set(xlabel="1 - specificity", ylabel="sensitivity")
    ax.legend()
    return ax


def survival_plot(model: Any, X: Any, y: Any, parts: int = 3, ax: Any = None) -> Any:
    """Draw Kaplan-Meier curves of rows with low to high predicted hazard."""
    ax = _axes(ax)
    time, event = checked_times(two_columns(y))
    edges = np.quantile(risk := model.predict(X), np.linspace(0, 1, parts + 1)[1:-1])
    group = np.searchsorted(edges, risk)
    for part in range(parts):
        inside = group == part
        times, share = kaplan_meier(time[inside], event[inside])
        ax.step(times, share, where="post", label=f"hazard {part + 1} of {parts}")
    ax.set(xlabel="time", ylabel="survival", ylim=(0, 1))
    ax.legend(fontsize="small")
    return ax


def kaplan_meier(time: Array, event: Array) -> tuple[Array, Array]:
    """Return the times of events, from 0, and the share of survivors after each.

    >>> kaplan_meier(np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 1.0]))
    (array([0., 1., 3.]), array([1.        , 0.66666667, 0.        ]))
    """
    times = np.unique(time[event == 1])
    at_risk = np.array([(time >= t).sum() for t in times])
    died = np.array([((time == t) & (event == 1)).sum() for t in times])
    share = np.cumprod(1 - died / at_risk) if len(times) else np.zeros(0)
    return np.append(0.0, times), np.append(1.0, share)
