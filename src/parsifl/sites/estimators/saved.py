"""Save and load fitted estimators as JSON, and build them from the sums of a deployment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.table_encoding import Preprocessing, TableColumn
from parsifl.engine.run_dir import DAMAGED
from parsifl.engine.safe_files import replace_file
from parsifl.linear.sparsity.dictionary import RandomDictionary
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.classifier import FederatedSparseClassifier
from parsifl.sites.estimators.cox import FederatedSparseCox
from parsifl.sites.estimators.cv import Products, held_out_errors, mean_errors
from parsifl.sites.estimators.exact import ExactFit
from parsifl.sites.estimators.moments import Array
from parsifl.sites.estimators.poisson import FederatedSparsePoisson
from parsifl.sites.estimators.regressor import FederatedSparseRegressor
from parsifl.sites.estimators.site_fits import SiteFits, fitted
from parsifl.sites.inference import Columns, path_criteria, was_selected
from parsifl.sites.search.certificate import Certificate
from parsifl.sites.search.subset_state import Phase, Rules, Search

_FORMAT = 2
_ESTIMATORS: dict[str, type[FederatedSparse]] = {
    kind.__name__: kind
    for kind in (
        FederatedSparseRegressor,
        FederatedSparseClassifier,
        FederatedSparsePoisson,
        FederatedSparseCox,
    )
}
_PARTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Preprocessing,
        TableColumn,
        Certificate,
        ExactFit,
        SiteFits,
        Search,
        Rules,
        Columns,
        RandomDictionary,
    )
}
_KINDS = "biufUO"
_MOST_BYTES = 1 << 28
"""Maximum size of an array; a dtype of long texts needs memory that the file does not have."""
_PRIVATE = frozenset({"_exact", "_columns", "_agreement_bytes", "_weighting", "_tuned"})
_WEIGHTS = frozenset({"coef_", "intercept_", "atom_coef_", "preprocessing_"})


def to_text(estimator: FederatedSparse) -> str:
    """Return a fitted estimator as JSON; numbers are restored bit for bit.

    The entry `summary` holds the table of coefficients for readers of the file.
    """
    name = type(estimator).__name__
    if name not in _ESTIMATORS:
        raise DataError(f"a {name} cannot be saved; save its best_estimator_")
    params = estimator.get_params(deep=False)
    state = {key: value for key, value in vars(estimator).items() if key not in params}
    values: dict[str, Any] = {
        "format": _FORMAT,
        "estimator": name,
        "params": _plain(params),
        "state": _plain(state),
    }
    if state.get("_exact") is not None:
        values["summary"] = summary_values(estimator)
    return json.dumps({**values, "sha256": _digest(values)}, indent=1)


def _digest(values: dict[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def summary_values(estimator: FederatedSparse) -> dict[str, Any]:
    """Return the parts of a lossless fit that a report shows, as JSON values."""
    summary, fit = estimator.summary(), estimator._fitted_exactly("a summary")
    return {
        **_path_values(estimator, fit),
        "fit": _site_values(estimator, fit),
        "table": summary.cells(),
        "guarantee": summary.guarantee,
        "methods": estimator.methods_text(),
        "clients": summary.sites,
        "sites": [
            {
                "name": name,
                "all": float(summary.estimate[i]),
                "estimates": _numbers(summary.site_estimates[:, i]),
                "errors": _numbers(summary.site_se[:, i]),
            }
            for i, name in enumerate(summary.names)
        ],
    }


def _path_values(estimator: FederatedSparse, fit: ExactFit) -> dict[str, Any]:
    """Return the best subsets of other sizes if the sums of the fit determine them."""
    ridge = bool((fit.rules.ridge > 0).any())
    if not fit.one_shot or ridge or not was_selected(fit):
        return {}
    path, names = fit.path(), estimator._names()
    values: dict[str, Any] = {
        "numbers": path.numbers.tolist(),
        "chosen": int(fit.rules.count),
        "names": names,
        "coefficients": [_numbers(row) for row in path.coefficients[:, : len(names)]],
        "criteria": path_criteria(fit, path),
    }
    if fit.centred:
        values["r2"] = _numbers(1 - path.losses / path.empty)
    if hasattr(estimator, "mean_error_"):
        values["error"] = _numbers(estimator.mean_error_)
        values["standard_error"] = _numbers(estimator.standard_error_)
    return {"path": values}


def _site_values(estimator: FederatedSparse, fit: ExactFit) -> dict[str, Any]:
    """Return how well the common model fits each site."""
    family, rows = estimator._family(), fit.rows
    values: dict[str, Any] = {"rows": rows.tolist()}
    if family == "gaussian":
        values["residual SD"] = _numbers(np.sqrt(np.maximum(2 * fit.losses / rows, 0.0)))
    elif family != "cox":
        if family == "binomial":
            values["deviance per row"] = _numbers(2 * fit.losses / rows)
        if fit.rules.width > len(estimator._names()) and not fit.own_intercepts:
            # the gradient of the intercept, the last column, is predicted minus observed
            values["excess"] = _numbers(-fit.gradients[:, -1] / rows)
            values["error"] = _numbers(np.sqrt(fit.information[:, -1, -1]) / rows)
    return values


def _numbers(values: Array) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def save(estimator: FederatedSparse, path: str | Path) -> None:
    """Write a fitted estimator to a JSON file, which `load` reads.

    Raises
    ------
    DataError
        If there is a file of this name that is not a saved estimator; it is not changed.
    """
    file, text = Path(path), to_text(estimator)
    try:
        if file.exists():
            _values(file)
        replace_file(file, text.encode())
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}") from error


def _values(path: Path) -> dict[str, Any]:
    """Return the content of a saved estimator of any format."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if {"format", "estimator", "params", "state"} <= set(values):
            return dict(values)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError):
        pass
    raise DataError(f"{path} is not a saved estimator")


def load(path: str | Path) -> FederatedSparse:
    """Read an estimator that `save` or a deployment wrote.

    Raises
    ------
    DataError
        If the file is damaged or not a saved estimator of this version.
    """
    values = _values(Path(path))
    if values["format"] != _FORMAT:
        raise DataError(f"{path} has format {values['format']!r}, expected {_FORMAT}")
    if values.get("sha256") != _digest(values):
        raise DataError(f"{path} is damaged or was edited: its checksum does not match")
    try:
        estimator = _ESTIMATORS[values["estimator"]](**_read(values["params"]))
        state = _read(values["state"])
        _check_state(state)
    except DAMAGED as error:
        raise DataError(f"{path} is not a saved estimator ({type(error).__name__})") from None
    estimator.__dict__.update(state)
    return estimator


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise unless these are fitted attributes whose numbers can be used for prediction."""
    for name, value in state.items():
        fitted = name in _PRIVATE or (name.isidentifier() and name.endswith("_"))
        if not fitted or name.startswith("__"):
            raise ValueError(name)
        if name in _WEIGHTS and not _is_finite(value):
            raise ValueError(name)
    if "coef_" not in state:
        raise LookupError("coef_")


def _is_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return _is_finite(list(value.values()))
    if is_dataclass(value):
        return all(_is_finite(getattr(value, part.name)) for part in fields(value))
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        entries = [_plain(entry) for entry in value.ravel().tolist()]
        return {"array": value.dtype.str, "shape": list(value.shape), "values": entries}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and type(value).__name__ in _PARTS:
        parts = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {"part": type(value).__name__, "fields": parts}
    if isinstance(value, tuple):
        return {"tuple": [_plain(entry) for entry in value]}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {"mapping": {str(key): _plain(entry) for key, entry in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return int(value) if isinstance(value, Phase) else value
    raise DataError(f"a value of {type(value).__name__} cannot be saved as JSON")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        dtype = np.dtype(value["array"])
        if dtype.kind not in _KINDS or dtype.itemsize * len(value["values"]) > _MOST_BYTES:
            raise ValueError("dtype")
        return np.array(value["values"], dtype=dtype).reshape(value["shape"])
    if "tuple" in value:
        return tuple(_read(entry) for entry in value["tuple"])
    if "mapping" in value:
        return {key: _read(entry) for key, entry in value["mapping"].items()}
    kind, entries = _PARTS[value["part"]], {k: _read(v) for k, v in value["fields"].items()}
    if kind is Search:
        entries["phase"] = Phase(entries["phase"])
    return kind(**entries)


@dataclass(frozen=True, eq=False)
class DeployedFit:
    """The result of a deployment.

    Attributes
    ----------
    preprocessing, sites
        The agreed encoding, and the names of the sites.
    coefficients
        In standardised units; an intercept is the last one, except for a linear regression.
    exact
        The last sums of the lossless solver; None for the others.
    target_mean, classes
        The mean of the target (linear regression), or its two classes (logistic regression).
    solver, history, bytes_up, bytes_down
        The algorithm, its rounds, and all bytes, including the agreement.
    products
        The products of all columns at every site, if the sites sent them; else empty.
    left_out
        Sites that their guards excluded from the fit, with the reason.
    """

    preprocessing: Preprocessing
    sites: Sequence[str]
    coefficients: Array
    exact: ExactFit | None
    target_mean: float
    classes: tuple[str, ...]
    solver: str
    history: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    constant: float = 0.0
    products: Sequence[Products] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def assembled(estimator: FederatedSparse, outcome: DeployedFit) -> FederatedSparse:
    """Return the estimator, as if fitted to the rows of all sites."""
    family, preprocessing = estimator._family(), outcome.preprocessing
    model: Any = estimator
    model.preprocessing_ = preprocessing
    model.feature_names_in_ = np.array(
        [column.name for column in preprocessing.columns], dtype=object
    )
    model.n_features_in_ = len(preprocessing.columns)
    model.clients_ = np.array(outcome.sites)
    model.left_out_ = dict(outcome.left_out)
    model.solver_, model.solver_reason_ = outcome.solver, "as deployed"
    model.history_, model.n_iter_ = outcome.history, len(outcome.history)
    model.bytes_up_, model.bytes_down_ = outcome.bytes_up, outcome.bytes_down
    model._exact = outcome.exact
    if outcome.exact is not None:
        model.loss_ = outcome.exact.search.loss / outcome.exact.search.rows
    width = len(preprocessing.names)
    coefficients = outcome.coefficients[:width]
    model.support_ = np.flatnonzero(coefficients)
    model.coef_ = coefficients / preprocessing.scale
    if family == "cox":
        model._note(np.zeros(width), preprocessing.scale)
        return estimator
    centred = family == "gaussian"
    base = outcome.target_mean if centred else float(outcome.coefficients[-1])
    model.intercept_ = base - float(model.coef_ @ preprocessing.mean)
    if family == "binomial":
        model.classes_ = np.array(outcome.classes)
        model.coef_, model.intercept_ = model.coef_[None], np.array([model.intercept_])
    if centred:
        model._note(preprocessing.mean, preprocessing.scale, "global", outcome.target_mean)
        if outcome.products and outcome.exact is not None:
            model._exact = replace(model._exact, by_site=_linear_fits(outcome))
        if len(outcome.products) > 1:
            _note_errors(model, outcome.products)
    else:
        model._note(preprocessing.mean, preprocessing.scale, constant=outcome.constant)
    return estimator


def _linear_fits(outcome: DeployedFit) -> SiteFits:
    """Return the fits of sites with their own intercepts, from their products of columns."""
    assert outcome.exact is not None
    columns = outcome.exact.columns
    answers = []
    for site in outcome.products:
        terms = site.with_intercept(columns)
        first = np.append(outcome.coefficients[columns], 0.0)
        answers.append((terms(first), *fitted(terms, first)))
    fits = SiteFits.of(answers, [site.count for site in outcome.products], "shared")
    return replace(fits, outer=np.zeros(0), site_outer=np.zeros(0))


def _note_errors(model: Any, sites: Sequence[Products]) -> None:
    """Set the cross-validation error of each number of terms on left-out sites."""
    model.path_ = model._exact.path_numbers()
    held = [np.array([site]) for site in range(len(sites))]
    errors = held_out_errors(model, sites, model.path_, held)
    rows = np.array([part.count for part in sites])
    model.error_path_ = errors
    model.mean_error_, model.standard_error_ = mean_errors(errors, rows)
