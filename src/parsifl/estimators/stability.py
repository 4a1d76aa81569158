"""Stability selection: how often a feature is selected when half of the clients are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sklearn.base import clone
from sklearn.utils import _safe_indexing, check_array, check_consistent_length

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.data.tables import is_table
from parsifl.estimators.preprocessor import owners
from parsifl.estimators.settings import whole


@dataclass(frozen=True)
class Stability:
    """The outcome of stability selection.

    Attributes
    ----------
    frequency
        How often each feature was selected.
    support
        The features that were selected at least as often as the threshold says.
    selected
        The mean number of features in a subsample's model, q.
    false_bound
        q^2 / ((2 threshold - 1) p): a bound on the expected number of false selections, valid if
        false features are exchangeable and the method is no worse than guessing (Meinshausen and
        Bühlmann, 2010). It is no p-value.
    names
        The columns of a table, or their positions as text.
    threshold
        The least share of subsamples.
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
    """Fit an estimator to many halves of the federation and count what it selects.

    Parameters
    ----------
    estimator
        An estimator of this package; it is cloned.
    by
        A subsample is half of the "clients", or half of the "rows" of every client.
    threshold
        Above one half.
    """
    _check(subsamples, threshold, by, seed)
    X = X if is_table(X) else check_array(X, accept_sparse="csr", dtype=np.float64)
    names = [str(name) for name in getattr(X, "columns", range(X.shape[1]))]
    y, count = np.asarray(y), 0
    check_consistent_length(X, y, groups)
    owner = owners(groups, len(y))[1]
    if by == "clients" and owner.max() < 1:
        raise ConfigError("half of one client is none: use by='rows', or give at least 2 clients")
    if getattr(estimator, "dictionary", None) is not None:
        raise ConfigError(
            "stability selection counts features, and with a dictionary every feature has a "
            "coefficient: give X @ dictionary to an estimator without one"
        )
    frequency = np.zeros(X.shape[1])
    for number in range(subsamples):
        rows = _half(owner, by, Key(seed, round=number, purpose="stability"))
        part = _safe_indexing(X, rows)
        chosen = clone(estimator).fit(part, y[rows], groups=owner[rows]).selected()
        frequency[[names.index(str(column)) for column in chosen]] += 1
        count += len(chosen)
    frequency /= subsamples
    selected = count / subsamples
    bound = selected**2 / ((2 * threshold - 1) * X.shape[1])
    support = np.flatnonzero(frequency >= threshold)
    return Stability(frequency, support, selected, bound, names, threshold)


def _check(subsamples: Any, threshold: Any, by: str, seed: Any) -> None:
    if not isinstance(threshold, float | int) or not 0.5 < threshold <= 1:
        raise ConfigError(f"threshold must be above 0.5 and at most 1, got {threshold!r}")
    for name, number, least in (("subsamples", subsamples, 1), ("seed", seed, 0)):
        if not whole(number) or number < least:
            raise ConfigError(f"{name} must be a whole number and at least {least}, got {number!r}")
    if by not in ("clients", "rows"):
        raise ConfigError(f"by must be 'clients' or 'rows', got {by!r}")


def _half(owner: npt.NDArray[np.int64], by: str, key: Key) -> npt.NDArray[np.int64]:
    draw = key.numpy_generator()
    clients = int(owner.max()) + 1
    if by == "clients":
        chosen = draw.permutation(clients)[: max(clients // 2, 1)]
        return np.flatnonzero(np.isin(owner, chosen))
    parts = [draw.permutation(np.flatnonzero(owner == client)) for client in range(clients)]
    return np.sort(np.concatenate([part[: max(len(part) // 2, 1)] for part in parts]))
