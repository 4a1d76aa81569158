"""The number of coefficients chosen by cross-validation over clients."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin, clone
from sklearn.model_selection import GroupKFold, KFold, check_cv
from sklearn.utils.validation import check_is_fitted, validate_data

from parsifl.estimators.base import FederatedSparse
from parsifl.estimators.moments import Array
from parsifl.estimators.regressor import FederatedSparseRegressor


class FederatedSparseRegressorCV(RegressorMixin, FederatedSparse):  # type: ignore[misc]  # untyped
    """A sparsity path: each number of coefficients is judged on clients that were left out.

    Parameters
    ----------
    path
        Numbers of non-zero coefficients to try; None: 1, 2, 4 ... up to half of the features.
    cv
        How many folds of whole clients (of rows, if there is one client), at most one a client
        (with a warning, if more are asked for); or a splitter or a list of splits, as everywhere
        in scikit-learn. A fold that would fit or judge rows of weight 0 alone is left out.
    estimator
        The regressor that is fitted; None is `FederatedSparseRegressor()`.

    Attributes
    ----------
    n_nonzero_coefs_
        The number with the least mean squared error over all rows that were left out: a fold
        counts by its rows, not as one of so many.
    path_, mse_path_
        The numbers tried, and the errors [numbers, folds].
    best_estimator_, coef_, intercept_, support_
        Fitted to all clients with the chosen number.
    bytes_up_, bytes_down_
        Of everything: all fits of the path and the last one.
    """

    def __init__(self, path: Any = None, *, cv: Any = 5, estimator: Any = None) -> None:
        self.path = path
        self.cv = cv
        self.estimator = estimator

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> FederatedSparseRegressorCV:
        """Try the path, then fit to all clients."""
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        names, _ = self._clients(groups, len(y))
        weight = self._weights(sample_weight, X)
        self.path_ = self._numbers(self._base()._width(X.shape[1]))
        folds = _with_weight(self._folds(X, groups, len(names)), weight)
        self.bytes_up_ = self.bytes_down_ = 0
        self.mse_path_ = np.array(
            [
                [self._error(number, X, y, groups, weight, fold) for fold in folds]
                for number in self.path_
            ]
        )
        held = [float(weight[rows].sum()) for _, rows in folds]
        best = int(np.average(self.mse_path_, axis=1, weights=held).argmin())
        self.n_nonzero_coefs_ = int(self.path_[best])
        self.best_estimator_ = self._fitted(self.n_nonzero_coefs_, X, y, groups, weight)
        self.coef_, self.intercept_ = self.best_estimator_.coef_, self.best_estimator_.intercept_
        self.support_, self.n_iter_ = self.best_estimator_.support_, self.best_estimator_.n_iter_
        return self

    def _numbers(self, width: int) -> Array:
        if self.path is not None:
            numbers = np.asarray(self.path)
            whole = numbers.ndim == 1 and numbers.size and np.issubdtype(numbers.dtype, np.integer)
            if not whole or numbers.min() < 1 or numbers.max() > width:
                raise ValueError(
                    f"path must list numbers of coefficients between 1 and {width}, "
                    f"got {self.path!r}"
                )
            return numbers.astype(np.int64)
        most = max(width // 2, 1)
        return np.unique(np.minimum(2 ** np.arange(int(np.log2(most)) + 2), most))

    def _folds(self, x: Any, groups: Any, clients: int) -> list[tuple[Array, Array]]:
        if not isinstance(self.cv, int | np.integer):
            return list(check_cv(self.cv).split(x, groups=groups))
        most, kind = (clients, "clients") if clients > 1 else (x.shape[0], "rows")
        if self.cv > most:
            warnings.warn(
                f"cv={self.cv}, but there are {most} {kind}: each of {most} folds leaves out one",
                UserWarning,
                stacklevel=3,
            )
        if clients > 1:
            return list(GroupKFold(min(self.cv, most)).split(x, groups=np.asarray(groups)))
        return list(KFold(min(self.cv, most), shuffle=True, random_state=0).split(x))

    def _base(self) -> FederatedSparseRegressor:
        base = FederatedSparseRegressor() if self.estimator is None else self.estimator
        if not isinstance(base, FederatedSparseRegressor):
            raise ValueError(f"estimator must be a FederatedSparseRegressor, got {base!r}")
        return base

    def _error(
        self, number: int, x: Any, y: Array, groups: Any, weight: Array, fold: tuple[Array, Array]
    ) -> float:
        train, held = fold
        inside = None if groups is None else np.asarray(groups)[train]
        model = self._fitted(int(number), x[train], y[train], inside, weight[train])
        errors = (model.predict(x[held]) - y[held]) ** 2
        return float(np.average(errors, weights=weight[held]))

    def _fitted(
        self, number: int, x: Any, y: Array, groups: Any, weight: Array
    ) -> FederatedSparseRegressor:
        model: FederatedSparseRegressor = clone(self._base()).set_params(n_nonzero_coefs=number)
        model.fit(x, y, groups=groups, sample_weight=weight)
        self.bytes_up_ += model.bytes_up_
        self.bytes_down_ += model.bytes_down_
        return model

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return self.best_estimator_.predict(X)


def _with_weight(folds: list[tuple[Array, Array]], weight: Array) -> list[tuple[Array, Array]]:
    """Leave out folds of which either side has rows of weight 0 alone."""
    found = [fold for fold in folds if all(weight[rows].any() for rows in fold)]
    if not found:
        raise ValueError(
            "no fold has rows with a positive sample_weight on both sides; weigh more clients"
        )
    return found
