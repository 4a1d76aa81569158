"""Sparse Cox regression across sites."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from parsifl.core.errors import ParsiflWarning
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.moments import Array, Indices, centred, gather
from parsifl.sites.families.cox import Cox, Ties

_TIED = 0.05
"""The share of tied events above which Breslow's bias is a matter for intervals."""


class FederatedSparseCox(FederatedSparse):
    """Proportional hazards with few non-zero coefficients, stratified by site.

    Every site has its own baseline hazard, which never leaves it. The fit equals the pooled
    stratified one. A site without an event has no influence on the coefficients.

    Parameters are those of `FederatedSparseRegressor`; the only solver is "exact", and X must be
    dense. `ties` says how events of the same time at a site count: "breslow", the default, or
    "efron", which is more accurate if times are rounded, for example to months (a warning says
    when). `y` has two columns, the time and whether the event was observed (1) or censored (0), or
    is a structured array with a Boolean field and a number (as in scikit-survival); with one
    dimension every event was observed. The score is Harrell's concordance.

    Examples
    --------
    >>> draw = np.random.default_rng(0)
    >>> X = draw.standard_normal((200, 6))
    >>> time = draw.exponential(np.exp(-X[:, 3]))
    >>> y = np.stack([np.minimum(time, 2.0), time < 2.0], axis=1)
    >>> model = FederatedSparseCox(1).fit(X, y, groups=np.arange(200) % 4)
    >>> model.support_.tolist(), model.score(X, y) > 0.7
    ([3], True)
    """

    _papers = False
    fit_intercept = True  # the baseline takes its part

    def __init__(  # noqa: PLR0913 - scikit-learn reads the parameters from the signature
        self,
        n_nonzero_coefs: int | None = None,
        *,
        solver: str = "auto",
        rounds: int | None = None,
        l2: float | None = None,
        standardize: bool = True,
        keep: Any = (),
        column_groups: Any = None,
        max_bytes: int = 8_000_000,
        certificate_rounds: int = 0,
        ties: Ties = "breslow",
        weight_type: str = "sampling",
    ) -> None:
        self.n_nonzero_coefs = n_nonzero_coefs
        self.solver = solver
        self.rounds = rounds
        self.l2 = l2
        self.standardize = standardize
        self.keep = keep
        self.column_groups = column_groups
        self.max_bytes = max_bytes
        self.certificate_rounds = certificate_rounds
        self.ties = ties
        self.weight_type = weight_type

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        tags.target_tags.required = True
        return tags

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> FederatedSparseCox:
        """Fit to rows that belong to the sites named in `groups` (None: a single site)."""
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        X, y = self._validated(
            X, two_columns(y), groups, sample_weight, multi_output=True, ensure_min_samples=2
        )
        time, event = checked_times(y)
        self.clients_, parts = self._clients(groups, len(time))
        weight = self._weights(sample_weight, X)
        if not (weight * event).any():
            raise ValueError("no event was observed: there is nothing to fit")
        self._say_if_tied(time, event * weight, parts)
        moments = gather(X, time, weight, parts, standardize=self.standardize)
        x = centred(X, moments) / moments.scale
        always = self._kept(X.shape[1])
        self._say_what_cannot_be_kept(x, always)
        l2 = 0.0 if self.l2 is None else self.l2
        problem = Cox(X.shape[1], l2=l2, keep=always, weighted=True, ties=self.ties)
        targets = torch.from_numpy(np.stack([time, event, weight], axis=1))
        coefficients = self._train(problem, x, targets, parts, moments)
        self._say_if_pooled(groups)
        self._note(np.zeros_like(moments.mean), moments.scale)
        self.n_events_ = int(((weight > 0) & (event > 0)).sum())
        self.support_ = np.flatnonzero(coefficients)
        self.coef_: Array = coefficients / moments.scale
        return self

    def _say_if_tied(self, time: Array, events: Array, parts: list[Indices]) -> None:
        """Warn if Breslow's method would bias the coefficients."""
        share = tied_share([(time[rows], events[rows]) for rows in parts])
        if self.ties == "breslow" and share > _TIED:
            warnings.warn(
                f"events of the same time are {share:.1%} of the rows at risk, on average: with "
                "ties='breslow' coefficients are biased towards 0. Set ties='efron'",
                ParsiflWarning,
                stacklevel=3,
            )

    def _family(self) -> str:
        return "cox"

    def predict(self, X: Any) -> Array:
        """Return the log of each row's hazard ratio against a row of zeros at the same site."""
        X = self._features(X)
        return np.asarray(X @ self.coef_)

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Return Harrell's concordance; with `groups`, pairs are formed within sites."""
        time, event = checked_times(np.asarray(two_columns(y), dtype=np.float64))
        return concordance(self.predict(X), time, event, groups)


def tied_share(sites: list[tuple[Array, Array]]) -> float:
    """Return how many of the rows at risk have an earlier event of the same time, on average.

    The average is over events. It is about the relative error of Breslow's coefficients.

    >>> tied_share([(np.array([1.0, 1.0, 2.0, 2.0]), np.array([1.0, 1.0, 1.0, 0.0]))])
    0.08333333333333333
    """
    share, total = 0.0, 0
    for time, events in sites:
        times, count = np.unique(time[events > 0], return_counts=True)
        at_risk = len(time) - np.searchsorted(np.sort(time), times)
        share += float((count * (count - 1) / 2 / at_risk).sum())
        total += int(count.sum())
    return share / max(total, 1)


def concordance(risk: Array, time: Array, event: Array, groups: Any = None) -> float:
    """Return the fraction of comparable pairs in which the earlier event has the higher risk.

    >>> concordance(np.array([2.0, 1.0]), np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    1.0
    """
    owner = np.zeros(len(time)) if groups is None else np.asarray(groups)
    right = total = 0.0
    for i in np.flatnonzero(event):
        later = (time > time[i]) | ((time == time[i]) & (event == 0))
        others = risk[later & (owner == owner[i])]
        right += float((others < risk[i]).sum()) + 0.5 * float((others == risk[i]).sum())
        total += len(others)
    return right / total if total else float("nan")


def two_columns(y: Any) -> Any:
    """Convert a structured target to time and event; return others unchanged."""
    names = getattr(getattr(y, "dtype", None), "names", None)
    if names:
        kinds = {np.dtype(y.dtype[name]).kind: name for name in names}
        if len(names) != 2 or "b" not in kinds or len(kinds) != 2:
            raise ValueError("a structured y needs a Boolean field (the event) and a time")
        event = kinds.pop("b")
        return np.stack([y[next(iter(kinds.values()))], y[event]], axis=1).astype(np.float64)
    return y


def checked_times(y: Any) -> tuple[Array, Array]:
    """Return times, and whether the events were observed."""
    y = np.asarray(y, dtype=np.float64)
    if y.ndim == 1 or y.shape[1] == 1:
        return y.ravel(), np.ones(len(y))
    if y.ndim != 2 or y.shape[1] != 2:
        raise ValueError(
            "y needs two columns, the time and whether the event occurred (0 or 1), got shape "
            f"{y.shape}"
        )
    if (other := y[~np.isin(y[:, 1], (0.0, 1.0)), 1]).size:
        raise ValueError(
            f"the second column of y, whether the event occurred, must be 0 or 1, got {other[0]:g}"
        )
    if (y[:, 0] < 0).any():
        raise ValueError(
            f"the first column of y is the time until the event, got {y[:, 0].min():g}; times must "
            "not be negative"
        )
    return y[:, 0], y[:, 1]
