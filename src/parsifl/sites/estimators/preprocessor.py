"""The encoding of tables as a scikit-learn transformer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from parsifl.core.errors import ParsiflWarning
from parsifl.data.table_encoding import Preprocessing, summarise, unit_notes
from parsifl.data.tables import Columns, as_columns, is_table
from parsifl.sites.estimators.moments import Array, Indices


class FederatedPreprocessor(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """Encode tables with words and missing values, as agreed by all sites from counts and sums.

    The estimators encode tables in the same way. Use this to inspect the design matrix, or in a
    pipeline before another estimator. A missing number becomes the mean over all sites, a missing
    word becomes its own level; each level except the most frequent one has an indicator.

    Parameters
    ----------
    standardize
        Whether to subtract means and divide by standard deviations, those of all sites together.

    Attributes
    ----------
    preprocessing_
        The agreement: levels, means and scales.
    bytes_up_, bytes_down_
        The bytes of the agreement.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"age": [40.0, 50.0, None], "ward": ["a", "b", "a"]})
    >>> encoder = FederatedPreprocessor().set_output(transform="pandas")
    >>> encoder.fit_transform(table, groups=[0, 0, 1])
        age  ward=b
    0  40.0     0.0
    1  50.0     1.0
    2  45.0     0.0
    """

    def __init__(self, *, standardize: bool = False) -> None:
        self.standardize = standardize

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> FederatedPreprocessor:
        """Agree on the encoding; rows belong to the sites named in `groups` (None: one site)."""
        del y
        columns = self._columns(X, reset=True)
        rows = len(next(iter(columns.values())))
        names, owner = owners(groups, rows)
        parts = [np.flatnonzero(owner == site) for site in range(len(names))]
        self.preprocessing_, sizes = agreed(columns, parts, [f"site {name}" for name in names])
        self.bytes_up_, self.bytes_down_ = sizes
        return self

    def fit_transform(self, X: Any, y: Any = None, groups: Any = None) -> Any:
        """Fit, and return the encoded table."""
        return self.fit(X, y, groups).transform(X)

    def transform(self, X: Any) -> Array:
        """Return the design matrix of a table; columns are matched by name."""
        check_is_fitted(self)
        columns = self._columns(X, reset=False)
        preprocessing = self.preprocessing_
        return (
            preprocessing.standardised(columns)
            if self.standardize
            else preprocessing.design(columns)
        )

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray[Any, Any]:
        """Return the columns of the design matrix: `age`, or `ward=surgery` for a level."""
        check_is_fitted(self)
        del input_features  # the names are those of the fit
        return np.array(self.preprocessing_.names, dtype=object)

    def _columns(self, x: Any, *, reset: bool) -> Columns:
        if not is_table(x):
            values = validate_data(
                self, x, dtype=np.float64, ensure_all_finite="allow-nan", reset=reset
            )
            return {f"x{i}": values[:, i] for i in range(values.shape[1])}
        columns = as_columns(x)
        if reset:
            self.feature_names_in_ = np.array(list(columns), dtype=object)
            self.n_features_in_ = len(columns)
        return columns


def agreed(
    columns: Columns, parts: Sequence[Indices], sites: Sequence[str]
) -> tuple[Preprocessing, tuple[int, int]]:
    """Return the agreement of sites with these rows, and the bytes it takes up and down.

    Warns about columns whose units seem to differ.
    """
    summaries = [
        summarise({name: column[part] for name, column in columns.items()}) for part in parts
    ]
    for note in unit_notes(summaries, sites):
        warnings.warn(note, ParsiflWarning, stacklevel=4)
    preprocessing = Preprocessing.of(summaries, sites)
    return preprocessing, (sum(part.size for part in summaries), len(parts) * preprocessing.size)


def owners(groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], Indices]:
    """Return the names of the sites and the site of each row; without groups there is one."""
    if groups is None:
        return np.array([0]), np.zeros(rows, np.int64)
    if isinstance(groups, list | tuple) and len({isinstance(name, str) for name in groups}) > 1:
        groups = np.array(groups, dtype=object)  # NumPy would turn numbers into text
    ids = np.asarray(groups)
    if ids.shape != (rows,):
        raise ValueError(
            f"groups must name the site of each of the {rows} rows, got "
            + (f"shape {ids.shape}" if ids.ndim else f"{groups!r}; pass the values of a column")
        )
    if any(name is None or name != name for name in ids.tolist()):
        raise ValueError("groups has missing values; every row needs a site")
    try:
        names, owner = np.unique(ids, return_inverse=True)
    except TypeError:
        kinds = sorted({type(name).__name__ for name in ids.tolist()})
        raise ValueError(
            f"groups mixes types that cannot be ordered ({', '.join(kinds)}); make all names "
            "text or all numbers"
        ) from None
    return names, owner
