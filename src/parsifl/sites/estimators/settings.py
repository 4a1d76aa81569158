"""Parameters shared by the estimators and their checks; sites, weights and standard units."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from parsifl import wire
from parsifl.core.batching import Rows
from parsifl.core.errors import ConfigError, ParsiflWarning, unknown
from parsifl.data.table_encoding import Preprocessing, is_words, observed
from parsifl.data.tables import Columns, as_columns, is_table
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.dictionary import RandomDictionary
from parsifl.sites.estimators.moments import Array, Indices, Moments, centred, scaled
from parsifl.sites.estimators.preprocessor import agreed, owners

_FEW_LEVELS = 10
"""How many levels a factor may have however few rows there are."""
WEIGHT_TYPES = ("sampling", "frequency", "precision")


class EstimatorSettings(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Abstract base: parameters, and the data prepared according to them."""

    def __init__(  # noqa: PLR0913 - scikit-learn reads the parameters from the signature
        self,
        n_nonzero_coefs: int | None = None,
        *,
        solver: str = "auto",
        rounds: int | None = None,
        local_steps: int = 3,
        batch_size: int | None = None,
        lr: float | str | None = None,
        l2: float | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        center: str = "global",
        keep: Any = (),
        column_groups: Any = None,
        dictionary: Any = None,
        refit: bool = True,
        max_bytes: int = 8_000_000,
        certificate_rounds: int = 0,
        certificate_nodes: int | None = None,
        participation: float = 1.0,
        random_state: Any = None,
        site_variances: bool = False,
        solver_options: Any = None,
        weight_type: str = "sampling",
        positive: Any = None,
    ) -> None:
        self.n_nonzero_coefs = n_nonzero_coefs
        self.solver = solver
        self.rounds = rounds
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.lr = lr
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.center = center
        self.keep = keep
        self.column_groups = column_groups
        self.dictionary = dictionary
        self.refit = refit
        self.max_bytes = max_bytes
        self.certificate_rounds = certificate_rounds
        self.certificate_nodes = certificate_nodes
        self.participation = participation
        self.random_state = random_state
        self.site_variances = site_variances
        self.solver_options = solver_options
        self.weight_type = weight_type
        self.positive = positive

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ------------------------------------------------------------------ settings and data
    def _setting(self, name: str, default: Any) -> Any:
        """Return a parameter that not every estimator has."""
        return getattr(self, name, default)

    preprocessing_: Preprocessing | None
    coef_: Array

    def _validated(
        self, X: Any, y: Any, groups: Any, sample_weight: Any, **checks: Any
    ) -> tuple[Any, Any]:
        """Return the design matrix and the target, both checked; tables are encoded.

        Sites agree on the encoding from counts and sums, each row with a weight counting once.
        """
        self._agreement_bytes = 0, 0
        self.imputed_: dict[str, float] = {}
        self._weighting = weighting(self.weight_type, sample_weight)
        check_target(y, as_numbers="y_numeric" in checks or "multi_output" in checks)
        if not is_table(X):
            self.preprocessing_ = None
            return validate_data(self, X, y, dtype=np.float64, **checks)  # type: ignore[no-any-return]
        columns = as_columns(X)
        rows = len(next(iter(columns.values())))
        if not rows:
            raise ValueError("X has 0 rows; at least 2 are needed")
        names, owner = owners(groups, rows)
        _, parts = self._clients(groups, rows)
        weight = self._weights(sample_weight, np.empty((rows, 1)))
        parts = [weighted for part in parts if len(weighted := part[weight[part] > 0])]
        sites = [f"site {names[owner[part[0]]]}" for part in parts]
        _say_if_odd_words(columns)
        preprocessing, self._agreement_bytes = agreed(columns, parts, sites)
        X, y = validate_data(self, preprocessing.design(columns), y, dtype=np.float64, **checks)
        self.preprocessing_ = preprocessing
        for column in preprocessing.columns:
            absent = 1 - float(observed(columns[column.name]).mean())
            if absent and not column.levels:
                self.imputed_[column.name] = absent
        self.feature_names_in_ = np.array(list(columns), dtype=object)
        self.n_features_in_ = len(columns)
        return X, y

    def _features(self, X: Any, **checks: Any) -> Any:
        """Return the design matrix of new rows; the columns of a table are matched by name."""
        check_is_fitted(self)
        preprocessing = self.preprocessing_
        if preprocessing is None:
            return validate_data(self, X, dtype=np.float64, reset=False, **checks)
        if is_table(X):
            names = [column.name for column in preprocessing.columns if column.name in X.columns]
            return preprocessing.design(as_columns(X[names]))
        if any(column.levels for column in preprocessing.columns):
            raise ValueError("the model was fitted to a table with words: pass a table")
        return validate_data(self, X, dtype=np.float64, reset=False, **checks)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray[Any, Any]:
        """Return the names of the coefficients: columns, or `ward=surgery` for a level."""
        check_is_fitted(self)
        del input_features  # the names are those of the fit
        return np.array(self._names(), dtype=object)

    def selected(self) -> list[Any]:
        """Return the columns of X in the model, as `keep` takes them: names, or positions."""
        check_is_fitted(self)
        used = np.flatnonzero(np.atleast_2d(self.coef_).any(axis=0))
        preprocessing = self.preprocessing_
        if preprocessing is None:
            return [int(column) for column in used]
        units = dict.fromkeys(preprocessing.units[column] for column in used)
        return [preprocessing.columns[unit].name for unit in units]

    def _names(self) -> list[str]:
        if self.preprocessing_ is not None:
            return self.preprocessing_.names
        names = getattr(self, "feature_names_in_", None)
        if names is not None:
            return [str(name) for name in names]
        return [f"x{number}" for number in range(self.n_features_in_)]

    def _clients(self, groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], list[Indices]]:
        """Return the names of the sites and the rows of each."""
        names, owner = owners(groups, rows)
        order = np.argsort(owner, kind="stable")
        return names, np.split(order, np.cumsum(np.bincount(owner))[:-1])

    def _weights(self, sample_weight: Any, x: Any) -> Array:
        """Return weights that are 1 on average over the rows with a non-zero weight."""
        weight = np.asarray(_check_sample_weight(sample_weight, x, dtype=np.float64))
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative")
        if weight.sum() == 0:
            raise ValueError("sample_weight is zero for every row")
        return np.asarray(weight * (np.count_nonzero(weight) / weight.sum()))

    def _check_center(self) -> bool:
        """Return whether every site has its own intercept."""
        center = self._setting("center", "global")
        if center not in ("global", "client"):
            raise ValueError(f"center must be 'global' or 'client', got {center!r}")
        if center == "client" and not self.fit_intercept:
            raise ValueError("center='client' gives every site an intercept: set fit_intercept")
        return bool(center == "client")

    def _width(self, features: int) -> int:
        """Return the number of coefficients to select from: features, or atoms."""
        dictionary = self._setting("dictionary", None)
        if dictionary is None:
            return features
        return (
            dictionary.atoms
            if isinstance(dictionary, RandomDictionary)
            else int(_matrix(dictionary).shape[1])
        )

    def _sparsity(self, features: int) -> int:
        """Return tau: how many units may be selected."""
        number: Any = self.n_nonzero_coefs
        width = self._width(features)
        if number is None:
            number = max(int(0.1 * width), 1)
        least = 0 if np.size(self.keep) else 1
        if not whole(number) or not least <= int(number) <= width:
            kind = "features" if self._setting("dictionary", None) is None else "atoms"
            raise ValueError(
                f"n_nonzero_coefs must be a number between {least} and {width} {kind}, got "
                f"{number!r}"
            )
        return int(number)

    def _units(self, width: int) -> tuple[int, ...]:
        """Return the unit of each coefficient, numbered from 0; empty if every column is one."""
        groups, preprocessing = self._setting("column_groups", None), self.preprocessing_
        if groups is None and (
            preprocessing is None or len(preprocessing.units) == len(set(preprocessing.units))
        ):
            return ()
        columns = width if preprocessing is None else len(preprocessing.columns)
        labels = np.arange(columns) if groups is None else np.asarray(groups)
        if labels.shape != (columns,):
            raise ValueError(
                f"column_groups must name the group of each of the {columns} columns, got shape "
                f"{labels.shape}"
            )
        wide = labels if preprocessing is None else labels[preprocessing.units]
        return tuple(np.unique(wide, return_inverse=True)[1].tolist())

    def _kept(self, width: int) -> tuple[int, ...]:
        """Return the coefficients that are always in the model."""
        preprocessing = self.preprocessing_
        columns = width if preprocessing is None else len(preprocessing.columns)
        names = [] if preprocessing is None else [column.name for column in preprocessing.columns]
        keep = np.asarray(self.keep)
        if keep.dtype == bool and keep.shape == (columns,):
            keep = np.flatnonzero(keep)
        if keep.ndim == 1 and keep.dtype.kind in "UO":
            absent = [name for name in keep.tolist() if name not in names]
            if absent:
                raise ValueError(f"keep names the column {absent[0]!r}, which X does not have")
            keep = np.array([names.index(name) for name in keep.tolist()], dtype=np.int64)
        if keep.ndim != 1 or (keep.size and not np.issubdtype(keep.dtype, np.integer)):
            raise ValueError(
                f"keep must list positions or names of features, or be a mask of all {columns}; "
                f"got {self.keep!r}"
            )
        positions = tuple(int(position) for position in keep)
        outside = [position for position in positions if not 0 <= position < columns]
        if outside:
            raise ValueError(f"keep names feature {outside[0]}, but there are 0 .. {columns - 1}")
        if positions and self._setting("dictionary", None) is not None:
            raise ValueError("keep names features, but with a dictionary atoms are selected")
        if preprocessing is None:
            return positions
        return tuple(i for i, unit in enumerate(preprocessing.units) if unit in positions)

    def _standardised(self, x: Any, moments: Moments) -> tuple[Any, Array]:
        """Return the features in standard units, for a problem with an intercept, and the means.

        A CSR matrix is not centred. Without an intercept nothing is centred.
        """
        if sparse.issparse(x):
            standardized = scaled(x, moments, intercept=bool(self.fit_intercept))
            return standardized, np.zeros_like(moments.mean)
        if not self.fit_intercept:
            return x / moments.scale, np.zeros_like(moments.mean)
        return centred(x, moments) / moments.scale, moments.mean

    def _with_common_intercept(
        self, coefficients: Array, problem: GLM, x: Any, y: torch.Tensor, sites: int
    ) -> Array:
        """Replace the intercepts that sites keep by the one that fits all rows best."""
        rows = Rows(as_design(x if sparse.issparse(x) else torch.from_numpy(x)), y, torch.ones(1))
        fit = problem.with_own_intercept({"coef": torch.from_numpy(coefficients)}, rows)
        self.bytes_up_ += 16 * 8 * sites  # slope and curvature, in about eight Newton steps
        return np.array(fit["coef"].numpy())

    def _say_what_cannot_be_kept(self, x: Any, always: tuple[int, ...]) -> None:
        """Warn about columns that are zero after centring: they cannot be in the support."""
        if gone := [position for position in always if not abs(x[:, position]).sum()]:
            why = "constant and thus equivalent to the intercept"
            if not self.fit_intercept:
                why = "zero in every row"
            elif self._setting("center", "global") == "client":
                why = "constant in every client and thus equivalent to its intercept"
            warnings.warn(
                f"keep names feature {gone[0]}, which is {why}: it gets the coefficient 0 and is "
                "not in support_",
                UserWarning,
                stacklevel=3,
            )

    # ------------------------------------------------------------------ the choice of a solver
    def _rounds(self, default: int) -> int:
        if self.rounds is None:
            return default
        if not whole(self.rounds) or self.rounds < 1:
            raise ConfigError(f"rounds must be a whole number and at least 1, got {self.rounds!r}")
        return int(self.rounds)

    def _options(self) -> dict[str, Any]:
        """Return further settings of the algorithm."""
        options = self._setting("solver_options", None)
        if options is None:
            return {}
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ConfigError(
                f"solver_options must map names of settings to values, got {options!r}"
            )
        return dict(options)

    def _check_local_steps(self) -> None:
        steps = self._setting("local_steps", 1)
        if not whole(steps) or steps < 1:
            raise ConfigError(f"local_steps must be a whole number and at least 1, got {steps!r}")

    # ------------------------------------------------------------------ a dictionary
    def _book_dictionary(self, clients: int) -> None:
        dictionary = self._setting("dictionary", None)
        if dictionary is not None:  # every site receives it once, before the first round
            self.dictionary_bytes_ = clients * wire.size(self._announcement(dictionary))
            self.bytes_down_ += self.dictionary_bytes_

    def _announcement(self, dictionary: Any) -> dict[str, torch.Tensor]:
        """Return the message that sends a site the dictionary: atoms, or how to draw them."""
        if isinstance(dictionary, RandomDictionary):
            kind = 0 if dictionary.kind == "orthonormal" else 1
            values = [kind, dictionary.features, dictionary.atoms, dictionary.seed]
            return {"dictionary": torch.tensor(values)}
        return {"dictionary": _matrix(dictionary)}

    def _atoms(self) -> torch.Tensor | None:
        dictionary = self._setting("dictionary", None)
        if isinstance(dictionary, RandomDictionary):
            return dictionary.draw()
        return None if dictionary is None else _matrix(dictionary)


def weighting(kind: str, sample_weight: Any) -> tuple[str, float, float]:
    """Return what weights mean, their mean, and the sum of their logarithms if the mean is 1.

    Rows of weight 0 do not count. Without weights the meaning is an empty text.
    """
    if kind not in WEIGHT_TYPES:
        raise ConfigError(unknown("weight_type", str(kind), WEIGHT_TYPES))
    if sample_weight is None:
        return "", 1.0, 0.0
    weight = np.atleast_1d(np.asarray(sample_weight, dtype=np.float64)).ravel()
    if kind == "frequency" and (weight != np.round(weight)).any():
        first = weight[weight != np.round(weight)][0]
        raise ValueError(
            "weight_type='frequency' says how often a row occurs, and needs whole numbers in "
            f"sample_weight; got {first:g}. Use 'precision' or 'sampling' for other weights"
        )
    weight = weight[weight > 0]
    if not len(weight):
        return kind, 1.0, 0.0
    scale = float(weight.mean())
    return kind, scale, float(np.log(weight / scale).sum())


def whole(value: Any) -> bool:
    """Return whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_target(y: Any, *, as_numbers: bool) -> None:
    """Reject missing values, and text where numbers are needed; scikit-learn checks the rest."""
    values = np.asarray(y)
    if values.ndim == 0 or not values.size or values.dtype.kind not in "fOU":
        return
    rows = values.reshape(len(values), -1)
    if values.dtype.kind == "f":
        absent = np.isnan(rows).any(axis=1)
    else:
        absent = np.array([any(map(_is_missing, row)) for row in rows.tolist()])
    if absent.any():
        raise ValueError(
            f"y is missing in {absent.sum()} of {len(rows)} rows (the first is row "
            f"{absent.argmax()}); remove these rows: only X may have missing values"
        )
    if not as_numbers or values.dtype.kind == "f":
        return
    for number, row in enumerate(rows.tolist()):
        if words := [value for value in row if isinstance(value, str) and not _is_number(value)]:
            raise ValueError(
                f"y must hold numbers, but has {words[0]!r} in row {number}; for classes use "
                "FederatedSparseClassifier"
            )


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ == "NAType":  # pandas.NA has no truth value
        return True
    return isinstance(value, float) and value != value


def _say_if_odd_words(columns: Columns) -> None:
    """Warn about text columns that are mostly numbers, or look like names of rows."""
    for name, values in columns.items():
        if not is_words(values):
            continue
        levels, rows = [str(level) for level in np.unique(values[observed(values)])], len(values)
        others = [level for level in levels if not _is_number(level)]
        if others and len(levels) >= 10 * len(others):
            warnings.warn(
                f"column {name!r} is treated as words because of values such as {others[0]!r}, but "
                "most of its values are numbers: replace such codes by numbers or by NaN",
                UserWarning,
                stacklevel=5,
            )
        elif len(levels) > max(_FEW_LEVELS, rows**0.5):
            warnings.warn(
                f"column {name!r} has {len(levels)} levels in {rows} rows and looks like an "
                "identifier: as one term it takes a coefficient for each level. Remove it, or "
                "merge levels",
                ParsiflWarning,
                stacklevel=5,
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _matrix(dictionary: Any) -> torch.Tensor:
    expected = "dictionary must be a finite matrix [features, atoms] or a `RandomDictionary`"
    try:
        atoms = np.array(dictionary, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{expected}, got {dictionary!r}") from None
    if atoms.ndim != 2 or not atoms.size or not np.isfinite(atoms).all():
        raise ValueError(f"{expected}, got an array of shape {atoms.shape}")
    return torch.from_numpy(atoms)
