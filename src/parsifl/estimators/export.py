"""Fitted estimators as those of scikit-learn, which other tools can convert."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from parsifl.core.errors import ConfigError
from parsifl.data.preprocessing import ABSENT, RARE, Preprocessing, TableColumn


def as_sklearn(estimator: Any) -> Any:
    """Return a scikit-learn estimator with the same predictions."""
    width = estimator.coef_.shape[-1]
    model = _model(estimator, width)
    found: Preprocessing | None = estimator.preprocessing_
    if found is None:
        names = getattr(estimator, "feature_names_in_", None)
        if names is not None:
            model.feature_names_in_ = names
        return model
    return make_pipeline(_transformer(found), model)


def _model(estimator: Any, width: int) -> Any:
    family, zeros = estimator._family(), np.zeros((2, width))
    intercept = getattr(estimator, "intercept_", 0.0)
    if family == "binomial":
        labels = estimator.classes_
        model = LogisticRegression(max_iter=1).fit(np.zeros((len(labels), width)), labels)
    elif family == "poisson":
        model = PoissonRegressor(max_iter=1).fit(zeros, np.ones(2))
    else:
        model = LinearRegression().fit(zeros, np.zeros(2))
    model.coef_, model.intercept_ = estimator.coef_.copy(), intercept
    return model


def _transformer(found: Preprocessing) -> ColumnTransformer:
    """Return a transformer that was fitted to a table with every level and the means."""
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("to_sklearn() of a fit to a table needs pandas; install it") from None
    steps = [(column.name, _step(column), [column.name]) for column in found.columns]
    rows = 2 * max([1, *(len(column.levels) for column in found.columns)])
    example = {column.name: _example(column, rows) for column in found.columns}
    transformer = ColumnTransformer(steps, verbose_feature_names_out=False)
    return transformer.set_output(transform="default").fit(pd.DataFrame(example))


def _step(column: TableColumn) -> Any:
    if not column.levels:
        return SimpleImputer(strategy="mean")
    rare = RARE in column.levels
    encoder = OneHotEncoder(
        categories=[np.array(column.levels, dtype=object)],
        drop=[column.levels[0]],
        handle_unknown="infrequent_if_exist" if rare else "ignore",
        min_frequency=2 if rare else None,
        sparse_output=False,
    )
    absent = [
        SimpleImputer(missing_values=code, strategy="constant", fill_value=ABSENT)
        for code in (None, np.nan)  # frames have either
    ]
    return make_pipeline(*absent, encoder)


def _example(column: TableColumn, rows: int) -> list[Any]:
    """Return values that a step learns from: the mean, or each level twice and (rare) once."""
    if not column.levels:
        return [column.mean[0]] * rows
    common = [level for level in column.levels if level != RARE]
    values = [level for level in column.levels for _ in range(1 + (level != RARE))]
    return [*values, *common[:1] * (rows - len(values))]
