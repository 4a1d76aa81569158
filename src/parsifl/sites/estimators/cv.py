"""The number of coefficients chosen by cross-validation over sites.

For a squared loss a site's count, sums and products determine every model without it and the
squared error of such a model on its rows. The final fit needs the same sums, so the path needs no
further messages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from scipy.special import xlogy
from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold, check_cv
from sklearn.utils import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key
from parsifl.data.tables import is_table
from parsifl.linear.glm import GLM
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.classifier import FederatedSparseClassifier
from parsifl.sites.estimators.cox import FederatedSparseCox, checked_times, concordance, two_columns
from parsifl.sites.estimators.export import Missing
from parsifl.sites.estimators.moments import Array, Indices
from parsifl.sites.estimators.poisson import FederatedSparsePoisson
from parsifl.sites.estimators.preprocessor import owners
from parsifl.sites.estimators.regressor import FederatedSparseRegressor
from parsifl.sites.estimators.settings import check_target
from parsifl.sites.estimators.site_fits import Terms
from parsifl.sites.search import best_subset, subset_state
from parsifl.sites.search.certificate import Certificate
from parsifl.sites.search.fedbestsubset import FedBestSubset
from parsifl.sites.search.subset_state import Sums
from parsifl.sites.standard_errors import Errors
from parsifl.sites.summary import Inference

RULES = ("best", "one-se")
Fold = tuple[Indices, Indices]
Extra = dict[str, Any]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows that took no part in a fit."""

    x: Any
    y: Any
    weight: Array
    groups: Any
    offset: Any


Error = Callable[[Any, HeldOut], float]


class FederatedSparseCV(FederatedSparse):
    """Abstract base: each number of coefficients is evaluated on sites that were left out.

    Parameters
    ----------
    path
        Numbers of non-zero coefficients to try; None: 1, 2, 4 ... up to half of the features.
    cv
        Number of folds of whole sites (of rows, if there is one site), at most one per site
        (with a warning if more are requested); or a splitter or a list of splits, as elsewhere
        in scikit-learn. A fold that would fit or evaluate only rows of weight 0 is skipped.
    estimator
        The estimator to fit; None: the estimator of the same name without CV.
    rule
        "best" takes the number with the smallest error, "one-se" the smallest number whose error
        is within one standard error of it.
    scoring
        The error to minimise; None: the first one that the class lists.

    Attributes
    ----------
    n_nonzero_coefs_
        The selected number.
    path_, error_path_
        The numbers tried, and the errors [numbers, folds]; less is better.
    mean_error_, standard_error_
        Their means over folds, weighted by rows, and the standard errors.
    best_estimator_, coef_, intercept_, support_
        Fitted to all sites with the chosen number.
    bytes_up_, bytes_down_
        Totals over all fits. For squared errors on left-out sites, all fits of the path follow from
        the sums that sites send once for the final fit.
    """

    _default: ClassVar[type[FederatedSparse]]
    _errors: ClassVar[dict[str, Error]]

    def __init__(
        self,
        path: Any = None,
        *,
        cv: Any = 5,
        estimator: Any = None,
        rule: str = "best",
        scoring: str | None = None,
    ) -> None:
        self.path = path
        self.cv = cv
        self.estimator = estimator
        self.rule = rule
        self.scoring = scoring

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Any:
        """Try the path, then fit to all sites."""
        return self._search(X, y, groups, sample_weight, {})

    def _search(self, X: Any, y: Any, groups: Any, sample_weight: Any, extra: Extra) -> Any:
        """Fit; `extra` holds further arrays of `fit`, with an entry for each row."""
        if self.rule not in RULES:
            raise ConfigError(unknown("rule", str(self.rule), RULES))
        name = next(iter(self._errors)) if self.scoring is None else self.scoring
        if name not in self._errors:
            raise ConfigError(unknown("scoring", str(name), tuple(self._errors)))
        X, y = self._data(X, y)
        rows = len(y)
        names, _ = self._clients(groups, rows)
        weight = self._weights(sample_weight, np.empty((rows, 1)))
        if sample_weight is not None:
            extra = {**extra, "sample_weight": np.asarray(sample_weight)}
        base = self._base()
        self.path_ = self._numbers(X.shape[1] if is_table(X) else base._width(X.shape[1]))
        folds = _with_weight(self._folds(y, groups, len(names)), weight)
        self.bytes_up_ = self.bytes_down_ = 0
        errors = None
        if name == "mse":
            errors = path_errors(base, X, y, groups, weight, self.path_, folds)
        if errors is None:
            error = self._errors[name]
            errors = np.array(
                [
                    [
                        self._error(error, int(k), X, y, groups, weight, extra, fold)
                        for fold in folds
                    ]
                    for k in self.path_
                ]
            )
        self.error_path_ = errors
        held = np.array([float(weight[rows].sum()) for _, rows in folds])
        self.n_nonzero_coefs_ = self._chosen(held)
        best = self._fitted(self.n_nonzero_coefs_, X, y, groups, extra, interim=False)
        best._tuned = len(self.path_) > 1
        self.best_estimator_ = best
        self._folds_used = len(folds)
        self.preprocessing_ = best.preprocessing_
        self.coef_, self.support_, self.n_iter_ = best.coef_, best.support_, best.n_iter_
        for attribute in ("intercept_", "classes_", "feature_names_in_", "n_features_in_"):
            if hasattr(best, attribute):
                setattr(self, attribute, getattr(best, attribute))
        return self

    def _data(self, x: Any, y: Any) -> tuple[Any, Any]:
        extra_checks = self._checks()
        check_target(y, as_numbers="y_numeric" in extra_checks or "multi_output" in extra_checks)
        if is_table(x):
            return x, np.asarray(y)
        checks = {"dtype": np.float64, "ensure_min_samples": 2, **extra_checks}
        return validate_data(self, x, y, **checks)  # type: ignore[no-any-return]

    def _checks(self) -> dict[str, Any]:
        return {"accept_sparse": "csr", "y_numeric": True}

    def _chosen(self, held: Array) -> int:
        """Return the number that the rule selects."""
        mean, error = mean_errors(self.error_path_, held)
        self.mean_error_, self.standard_error_ = mean, error
        best = int(mean.argmin())
        if self.rule == "one-se":
            close = mean <= mean[best] + error[best]
            return int(self.path_[close].min())
        return int(self.path_[best])

    def _numbers(self, width: int) -> Any:
        if self.path is not None:
            numbers = np.asarray(self.path)
            are_integers = (
                numbers.ndim == 1 and numbers.size and np.issubdtype(numbers.dtype, np.integer)
            )
            if not are_integers or numbers.min() < 1 or numbers.max() > width:
                raise ValueError(
                    f"path must list numbers of coefficients between 1 and {width}, "
                    f"got {self.path!r}"
                )
            return numbers.astype(np.int64)
        most = max(width // 2, 1)
        return np.unique(np.minimum(2 ** np.arange(int(np.log2(most)) + 2), most))

    def _folds(self, y: Any, groups: Any, sites: int) -> list[Fold]:
        rows = np.zeros((len(y), 1))
        if not isinstance(self.cv, int | np.integer):
            return list(check_cv(self.cv).split(rows, groups=groups))
        most, kind = (sites, "sites") if sites > 1 else (len(y), "rows")
        if self.cv > most:
            warnings.warn(
                f"cv={self.cv}, but there are {most} {kind}: each of {most} folds leaves out one",
                UserWarning,
                stacklevel=3,
            )
        folds = min(int(self.cv), most)
        if sites > 1:
            return list(GroupKFold(folds).split(rows, groups=np.asarray(groups)))
        return list(self._row_folds(folds).split(rows, y))

    def _row_folds(self, folds: int) -> Any:
        return KFold(folds, shuffle=True, random_state=0)

    def _base(self) -> Any:
        base = self._default() if self.estimator is None else self.estimator
        if not isinstance(base, self._default):
            raise ValueError(f"estimator must be a {self._default.__name__}, got {base!r}")
        return base

    def _error(
        self,
        error: Error,
        number: int,
        x: Any,
        y: Any,
        groups: Any,
        weight: Array,
        extra: Extra,
        fold: Fold,
    ) -> float:
        train, held = fold
        sites = None if groups is None else np.asarray(groups)
        inside = None if sites is None else sites[train]
        part = _safe_indexing(x, train)
        more = {name: values[train] for name, values in extra.items()}
        model = self._fitted(number, part, y[train], inside, more, interim=True)
        rows = HeldOut(
            _safe_indexing(x, held),
            y[held],
            weight[held],
            None if sites is None else sites[held],
            extra["offset"][held] if "offset" in extra else 0.0,
        )
        return error(model, rows)

    def _fitted(
        self, number: int, x: Any, y: Any, groups: Any, extra: Extra, *, interim: bool
    ) -> Any:
        model = clone(self._base()).set_params(n_nonzero_coefs=number)
        if interim:
            model._interim = True
        model.fit(x, y, groups=groups, **extra)
        self.bytes_up_ += model.bytes_up_
        self.bytes_down_ += model.bytes_down_
        return model

    def _family(self) -> str:
        return str(self._base()._family())

    # ------------------------------------------------------------------ what the best fit says
    @property
    def certificate_(self) -> Certificate:
        """The certificate of the chosen model."""
        check_is_fitted(self)
        return self.best_estimator_.certificate_  # type: ignore[no-any-return]

    def information_criteria(self, *, gamma: float = 1.0) -> dict[str, float]:
        """Return the log-likelihood and the criteria of the chosen model."""
        check_is_fitted(self)
        return self.best_estimator_.information_criteria(gamma=gamma)  # type: ignore[no-any-return]

    def summary(self, *, level: float = 0.95, se: Errors = "auto") -> Inference:
        """Return the table of the chosen model; its rows selected it, unless the path is fixed."""
        check_is_fitted(self)
        return self.best_estimator_.summary(level=level, se=se)  # type: ignore[no-any-return]

    def methods_text(self) -> str:
        """Return a paragraph for the methods section, with the cross-validation."""
        check_is_fitted(self)
        text: str = self.best_estimator_.methods_text()
        numbers = ", ".join(str(number) for number in self.path_)
        name = next(iter(self._errors)) if self.scoring is None else self.scoring
        rule = "smallest error" if self.rule == "best" else "one-standard-error rule"
        return (
            f"The number of terms ({self.n_nonzero_coefs_}, out of {numbers}) was chosen by "
            f"{self._folds_used}-fold cross-validation ({name}, {rule}). {text}"
        )

    def to_sklearn(self, *, missing: Missing = "nan") -> Any:
        """Return the chosen model as a fitted scikit-learn estimator."""
        check_is_fitted(self)
        return self.best_estimator_.to_sklearn(missing=missing)

    def predict(self, X: Any) -> Any:
        """Predict with the chosen model."""
        check_is_fitted(self)
        return self.best_estimator_.predict(self._checked(X))

    def _checked(self, x: Any) -> Any:
        if self.preprocessing_ is not None:
            return x
        return validate_data(self, x, accept_sparse="csr", dtype=np.float64, reset=False)


def _mse(model: Any, rows: HeldOut) -> float:
    return float(np.average((model.predict(rows.x) - rows.y) ** 2, weights=rows.weight))


def _log_loss(model: Any, rows: HeldOut) -> float:
    # by position: scikit-learn's log_loss sorts labels
    chance = model.predict_proba(rows.x)
    class_number = np.array([model.classes_.tolist().index(label) for label in rows.y.tolist()])
    likely = np.clip(chance[np.arange(len(class_number)), class_number], np.finfo(float).eps, 1.0)
    return -2 * float(np.average(np.log(likely), weights=rows.weight))


def _auc(model: Any, rows: HeldOut) -> float:
    if len(model.classes_) != 2:
        raise ValueError("scoring='auc' needs two classes; use 'deviance'")
    truth = rows.y == model.classes_[1]
    if truth.all() or not truth.any():
        return float("nan")
    scores = model.decision_function(rows.x)
    return 1 - float(roc_auc_score(truth, scores, sample_weight=rows.weight))


def _poisson_deviance(model: Any, rows: HeldOut) -> float:
    y, mean = rows.y, np.maximum(model.predict(rows.x, offset=rows.offset), 1e-300)
    return 2 * float(np.average(xlogy(y, y / mean) - y + mean, weights=rows.weight))


def _discordance(model: Any, rows: HeldOut) -> float:
    time, event = checked_times(rows.y)  # pairs have no weight
    return 1 - concordance(model.predict(rows.x), time, event, rows.groups)


class FederatedSparseRegressorCV(RegressorMixin, FederatedSparseCV):  # type: ignore[misc]  # untyped
    """Linear regression; the error is the mean squared one.

    Parameters and attributes are those of `FederatedSparseCV`.
    """

    _default = FederatedSparseRegressor
    _errors: ClassVar[dict[str, Error]] = {"mse": _mse}


class FederatedSparseClassifierCV(ClassifierMixin, FederatedSparseCV):  # type: ignore[misc]  # untyped
    """Logistic or softmax regression; the error is the "deviance", or with "auc" 1 - AUC.

    Parameters and attributes are those of `FederatedSparseCV`.
    """

    _default = FederatedSparseClassifier
    _errors: ClassVar[dict[str, Error]] = {"deviance": _log_loss, "auc": _auc}

    def _data(self, x: Any, y: Any) -> tuple[Any, Any]:
        x, y = super()._data(x, y)
        check_classification_targets(y)
        return x, y

    def _checks(self) -> dict[str, Any]:
        return {"accept_sparse": "csr"}

    def _row_folds(self, folds: int) -> Any:
        return StratifiedKFold(folds, shuffle=True, random_state=0)

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of every class."""
        check_is_fitted(self)
        return np.asarray(self.best_estimator_.predict_proba(self._checked(X)))

    def decision_function(self, X: Any) -> Array:
        """Return the log-odds of the second class, or one score per class."""
        check_is_fitted(self)
        return np.asarray(self.best_estimator_.decision_function(self._checked(X)))


class FederatedSparsePoissonCV(RegressorMixin, FederatedSparseCV):  # type: ignore[misc]  # untyped
    """Poisson regression; the error is the mean "deviance".

    Parameters and attributes are those of `FederatedSparseCV`.
    """

    _default = FederatedSparsePoisson
    _errors: ClassVar[dict[str, Error]] = {"deviance": _poisson_deviance}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
    ) -> Any:
        """Try the path, then fit to all sites; `offset` is the log of each row's exposure."""
        extra = {} if offset is None else {"offset": np.asarray(offset, dtype=np.float64)}
        return self._search(X, y, groups, sample_weight, extra)

    def predict(self, X: Any, offset: Any = 0.0) -> Any:
        """Return the expected counts of the chosen model; `offset` is the log of the exposure."""
        check_is_fitted(self)
        return self.best_estimator_.predict(self._checked(X), offset=offset)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the fraction of the deviance that is explained (1 is perfect)."""
        check_is_fitted(self)
        return float(self.best_estimator_.score(self._checked(X), y, sample_weight))


class FederatedSparseCoxCV(FederatedSparseCV):
    """Cox regression; the error is 1 - "concordance" within sites.

    Parameters and attributes are those of `FederatedSparseCV`.
    """

    _default = FederatedSparseCox
    _errors: ClassVar[dict[str, Error]] = {"concordance": _discordance}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        tags.target_tags.required = True
        return tags

    def _data(self, x: Any, y: Any) -> tuple[Any, Any]:
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        return super()._data(x, two_columns(y))

    def _checks(self) -> dict[str, Any]:
        return {"multi_output": True}

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Return Harrell's concordance; with `groups`, pairs are formed within sites."""
        check_is_fitted(self)
        return float(self.best_estimator_.score(self._checked(X), y, groups))


def _with_weight(folds: list[Fold], weight: Array) -> list[Fold]:
    """Skip folds in which either side has only rows of weight 0."""
    weighted = [fold for fold in folds if all(weight[rows].any() for rows in fold)]
    if not weighted:
        raise ValueError(
            "no fold has rows with a positive sample_weight on both sides; "
            "give more clients a positive weight"
        )
    return weighted


@dataclass(frozen=True, eq=False)
class Products:
    """Count, sums and products of the columns and the target (the last) of some sites."""

    count: float
    sums: Array
    products: Array

    @classmethod
    def of(cls, rows: Array, weight: Array) -> Products:
        """Compute the sums from rows."""
        return cls(float(weight.sum()), weight @ rows, rows.T @ (rows * weight[:, None]))

    @classmethod
    def from_zero(
        cls, loss: float, gradient: Array, curvature: Array, sums: Array, count: float
    ) -> Products:
        """Compute them from half the sum of squares and its derivatives at coefficients of 0."""
        cross = -gradient[:, None]
        products = np.block([[curvature, cross], [cross.T, np.array([[2 * loss]])]])
        return cls(count, sums, products)

    @classmethod
    def total(cls, parts: Sequence[Products]) -> Products:
        """Add up sites."""
        return cls(
            sum(part.count for part in parts),
            np.sum([part.sums for part in parts], axis=0),
            np.sum([part.products for part in parts], axis=0),
        )

    def answer(self, coefficients: Array, columns: Indices) -> tuple[float, Array, Array]:
        """Return half the sum of squares and its derivatives at these columns; no intercept."""
        b = np.append(coefficients, -1.0)
        residual = self.products @ b
        inner = self.products[np.ix_(columns, columns)]
        return float(b @ residual / 2), residual[columns], inner

    def with_intercept(self, columns: Indices) -> Callable[[Array], Terms]:
        """Return the derivatives at coefficients of these columns and an intercept."""
        wide = np.append(columns, len(self.sums) - 1)  # the target is the last column
        products = np.block(
            [
                [self.products[np.ix_(wide, wide)], self.sums[wide, None]],
                [self.sums[None, wide], np.array([[self.count]])],
            ]
        )
        order = np.delete(np.arange(len(wide) + 1), len(columns))
        inner, right = products[np.ix_(order, order)], products[order, len(columns)]
        squares = products[len(columns), len(columns)]

        def terms(b: Array) -> Terms:
            loss = float(b @ inner @ b / 2 - right @ b + squares / 2)
            nothing = np.zeros_like(inner)
            return Terms(loss, inner @ b - right, inner, nothing, 2 * loss)

        return terms

    def error(self, coefficients: Array, intercept: float) -> float:
        """Return the mean squared error of a model on these rows."""
        b = np.append(-coefficients, 1.0)  # y - x'b
        square = b @ self.products @ b - 2 * intercept * (b @ self.sums)
        return float(square / self.count + intercept**2)


def held_out_errors(
    base: FederatedSparseRegressor,
    sites: Sequence[Products],
    path: Indices,
    held: Sequence[Indices],
) -> Array:
    """Return mean squared errors [numbers, folds] on the sites `held` out in each fold."""
    errors = np.empty((len(path), len(held)))
    for j, out in enumerate(held):
        train = Products.total([part for site, part in enumerate(sites) if site not in out])
        test = Products.total([sites[site] for site in out])
        for i, number in enumerate(path):
            errors[i, j] = test.error(*_model(base, train, int(number)))
    return errors


def mean_errors(errors: Array, held: Array) -> tuple[Array, Array]:
    """Return the mean over folds, each weighted by the rows that it holds out, and its error.

    A fold without an error (NaN) is skipped.
    """
    weight = np.where(np.isfinite(errors), held, 0.0)
    if not (weight.sum(axis=1) > 0).all():
        raise ValueError("no fold has an error for every number; use fewer folds")
    total = weight.sum(axis=1, keepdims=True)
    values = np.where(np.isfinite(errors), errors, 0.0)
    mean = (weight * values).sum(axis=1) / total[:, 0]
    spread = (weight / total * (values - mean[:, None]) ** 2).sum(axis=1)
    count = np.maximum((weight > 0).sum(axis=1) - 1, 1)
    return mean, np.sqrt(spread / count)


def path_errors(
    base: FederatedSparseRegressor,
    x: Any,
    y: Array,
    groups: Any,
    weight: Array,
    path: Indices,
    folds: Sequence[tuple[Indices, Indices]],
) -> Array | None:
    """Return mean squared errors [numbers, folds]; None if they need separate fits."""
    if not _is_one_shot(base, x) or groups is None:
        return None
    base = clone(base)
    base.preprocessing_ = None
    _, owner = owners(groups, len(y))
    held = [np.unique(owner[rows]) for _, rows in folds]
    is_possible = all(
        not np.isin(owner[train], sites).any() and len(train) + len(rows) == len(y)
        for sites, (train, rows) in zip(held, folds, strict=True)
    )
    if not is_possible:
        return None
    columns = np.concatenate([x, y[:, None]], axis=1)
    columns = columns - np.average(columns, axis=0, weights=weight)  # known from the moments
    sites = [
        Products.of(columns[owner == site], weight[owner == site])
        for site in range(int(owner.max()) + 1)
    ]
    return held_out_errors(base, sites, path, held)


def _is_one_shot(base: FederatedSparseRegressor, x: Any) -> bool:
    """Return whether the fit needs only the whole matrix of products, once."""
    plain: bool = (
        base.solver in ("auto", "exact")
        and base.center == "global"
        and bool(base.fit_intercept)
        and base.dictionary is None
        and base.participation == 1
        and base.batch_size is None
    )
    if not plain or is_table(x) or sparse.issparse(x):
        return False
    width = int(x.shape[1])
    beside = FedBestSubset(max_bytes=int(base.max_bytes)).beside(width, 0, quadratic=True)
    return beside == width


def _model(base: FederatedSparseRegressor, train: Products, number: int) -> tuple[Array, float]:
    """Return slopes and intercept of the best subset of these sites."""
    width = len(train.sums) - 1
    mean = train.sums / train.count
    around = train.products - train.count * np.outer(mean, mean)
    variance = np.diag(around)[:-1] / train.count
    constant = variance <= 1e-12 * (np.diag(train.products)[:-1] / train.count)
    deviation = np.where(constant, 0.0, np.sqrt(np.maximum(variance, 0.0)))
    scale = np.where(constant | (not base.standardize), 1.0, deviation)
    inner = around[:-1, :-1] / np.outer(scale, scale) * np.outer(~constant, ~constant)
    right = around[:-1, -1] / scale * ~constant
    l2 = 0.0 if base.l2 is None else base.l2
    always = base._kept(width)
    problem = GLM(width, "squared-half", l2=l2, intercept=False, keep=always, weighted=True)
    tau = min(number, width - len(always))
    start = problem.init(Key(0))["coef"]
    rules = FedBestSubset(tau=tau, max_bytes=int(base.max_bytes), units=base._units(width)).rules(
        problem, start
    )
    sums = Sums(
        train.count, around[-1, -1] / 2, -right, np.diag(inner), inner[np.triu_indices(width)]
    )
    search = best_subset.advance(subset_state.begin(rules, np.zeros(width)), sums, rules)
    coefficients = search.coefficients / scale
    return coefficients, float(mean[-1] - coefficients @ mean[:-1])
