"""Convert fitted estimators to those of scikit-learn, which other tools can export."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

from parsifl.core.errors import ConfigError, unknown
from parsifl.data.table_encoding import ABSENT, RARE, Preprocessing, TableColumn
from parsifl.sites.estimators.moments import Array

Missing = Literal["nan", "empty"]
_MISSING = ("nan", "empty")


def as_sklearn(estimator: Any, missing: Missing) -> Any:
    """Return a scikit-learn estimator with the same predictions."""
    if missing not in _MISSING:
        raise ConfigError(unknown("missing", str(missing), _MISSING))
    preprocessing: Preprocessing | None = estimator.preprocessing_
    coefficients, intercept = estimator.coef_, np.asarray(getattr(estimator, "intercept_", 0.0))
    if preprocessing is None:
        model = _model(estimator, coefficients, intercept)
        names = getattr(estimator, "feature_names_in_", None)
        if names is not None:
            model.feature_names_in_ = names
        return model
    coefficients, intercept = _by_level(preprocessing, coefficients, intercept)
    return make_pipeline(
        _transformer(preprocessing, missing), _model(estimator, coefficients, intercept)
    )


def _model(estimator: Any, coefficients: Array, intercept: Array) -> Any:
    family, width = estimator._family(), coefficients.shape[-1]
    if family == "binomial":
        labels = estimator.classes_
        model = LogisticRegression(max_iter=1).fit(np.zeros((len(labels), width)), labels)
        model.classes_ = labels.copy()  # `positive` comes last, whatever its name
    elif family == "poisson":
        model = PoissonRegressor(max_iter=1).fit(np.zeros((2, width)), np.ones(2))
    else:
        model = LinearRegression().fit(np.zeros((2, width)), np.zeros(2))
    # NumPy's scalar type, as in scikit-learn: converters call its methods
    model.coef_, model.intercept_ = coefficients.copy(), intercept[()]
    return model


def _by_level(
    preprocessing: Preprocessing, coefficients: Array, intercept: Array
) -> tuple[Array, Array]:
    """Return coefficients of one indicator per level, and the intercept that goes with them.

    A level that no site had has no indicator. It counts as (rare) if levels were merged, else
    as the reference: the coefficient of that level becomes part of the intercept.
    """
    parts, start = [], 0
    for column in preprocessing.columns:
        width = len(column.names)
        by_level = coefficients[..., start : start + width]
        start += width
        if column.levels:
            by_level = np.concatenate([np.zeros_like(coefficients[..., :1]), by_level], axis=-1)
            if RARE in column.levels:
                rare = column.levels.index(RARE)
                intercept = intercept + by_level[..., rare]
                by_level = np.delete(by_level - by_level[..., [rare]], rare, axis=-1)
        parts.append(by_level)
    return np.concatenate(parts, axis=-1), intercept


def _transformer(preprocessing: Preprocessing, missing: Missing) -> ColumnTransformer:
    """Return a transformer that was fitted to a table with every level and the means."""
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("to_sklearn() of a fit to a table needs pandas; install it") from None
    steps = [
        (column.name, _step(column, missing), [column.name]) for column in preprocessing.columns
    ]
    rows = max([1, *(len(column.levels) for column in preprocessing.columns)])
    example = {column.name: _example(column, rows) for column in preprocessing.columns}
    transformer = ColumnTransformer(steps, verbose_feature_names_out=False)
    return transformer.set_output(transform="default").fit(pd.DataFrame(example))


def _step(column: TableColumn, missing: Missing) -> Any:
    if not column.levels:
        return SimpleImputer(strategy="mean")
    encoder = OneHotEncoder(
        categories=[np.array(_named(column), dtype=object)],
        handle_unknown="ignore",
        sparse_output=False,
    )
    if missing == "nan":
        absent: Any = FunctionTransformer(words, feature_names_out="one-to-one")
    else:
        absent = SimpleImputer(missing_values="", strategy="constant", fill_value=ABSENT)
    return make_pipeline(absent, encoder)


def words(table: Any) -> Any:
    """Return a table of words as objects, with a level for missing ones.

    The imputer of scikit-learn knows one code at a time, and rejects a frame that has others:
    frames mark missing words by None, NaN or pandas.NA, depending on the dtype.
    """
    import pandas as pd

    frame = pd.DataFrame(table).astype(object)
    return frame.mask(frame.isna(), ABSENT)


def _named(column: TableColumn) -> list[str]:
    return [level for level in column.levels if level != RARE]


def _example(column: TableColumn, rows: int) -> list[Any]:
    """Return values to fit a step on: the mean, or the levels."""
    if not column.levels:
        return [column.mean[0]] * rows
    values = _named(column) or [RARE]
    return [*values, *values[:1] * (rows - len(values))]
