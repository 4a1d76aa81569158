"""What the estimators share: clients from groups, standardisation, training, original units."""

from __future__ import annotations

import numbers
import warnings
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight

from parsifl import wire
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import Batch
from parsifl.core.errors import ConfigError, unknown
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.estimators.moments import Array, Indices, Moments, smoothness
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.dictionary import RandomDictionary

PURSUIT = ("fedgradmp", "inexactfedgradmp")
SOLVERS = (*PURSUIT, "fedht", "fediterht", "distributediht", "fedmid", "feddualavg")


class FederatedSparse(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Abstract base of the estimators."""

    def __init__(  # noqa: PLR0913 - scikit-learn reads the parameters from the signature
        self,
        n_nonzero_coefs: int | None = None,
        *,
        solver: str = "fedgradmp",
        rounds: int = 20,
        local_steps: int = 3,
        batch: int | None = None,
        lr: float | str | None = None,
        l2: float = 1e-3,
        fit_intercept: bool = True,
        standardize: bool = True,
        keep: Any = (),
        dictionary: Any = None,
        participation: float = 1.0,
        random_state: Any = None,
    ) -> None:
        self.n_nonzero_coefs = n_nonzero_coefs
        self.solver = solver
        self.rounds = rounds
        self.local_steps = local_steps
        self.batch = batch
        self.lr = lr
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.keep = keep
        self.dictionary = dictionary
        self.participation = participation
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _clients(self, groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], list[Indices]]:
        """Return the names of the clients and the rows of each."""
        names, owner = owners(groups, rows)
        order = np.argsort(owner, kind="stable")
        return names, np.split(order, np.cumsum(np.bincount(owner))[:-1])

    def _weights(self, sample_weight: Any, x: Any) -> Array:
        """Return weights that are 1 on average over the rows that count (whose weight is not 0)."""
        weight = np.asarray(_check_sample_weight(sample_weight, x, dtype=np.float64))
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative")
        if weight.sum() == 0:
            raise ValueError("sample_weight is zero for every row")
        return np.asarray(weight * (np.count_nonzero(weight) / weight.sum()))

    def _width(self, features: int) -> int:
        """Return how many coefficients there are to choose from: of features, or of atoms."""
        if self.dictionary is None:
            return features
        told = self.dictionary
        return told.atoms if isinstance(told, RandomDictionary) else int(_matrix(told).shape[1])

    def _sparsity(self, features: int, parts: list[Indices]) -> int:
        """Return tau, and say which clients have too few rows to determine their subproblem."""
        given: Any = self.n_nonzero_coefs
        width = self._width(features)
        if given is None:
            given = max(int(0.1 * width), 1)
        if not whole(given) or not 1 <= int(given) <= width:
            kind = "features" if self.dictionary is None else "atoms"
            raise ValueError(
                f"n_nonzero_coefs must be a number between 1 and {width} {kind}, got {given!r}"
            )
        tau = int(given)
        few = sum(len(rows) < min(3 * tau, width) for rows in parts)
        if few and self.solver in PURSUIT and len(parts) > 1:
            warnings.warn(
                f"{few} of {len(parts)} clients have fewer rows than 3 x {tau} coefficients: they "
                "take the minimiser nearest to the model that they received",
                UserWarning,
                stacklevel=3,
            )
        return tau

    def _method(self, tau: int, rate: float) -> AnyAlgorithm:
        if self.solver not in SOLVERS:
            raise ConfigError(unknown("solver", str(self.solver), SOLVERS))
        if not whole(self.local_steps) or self.local_steps < 1:
            raise ConfigError(
                f"local_steps must be a whole number and at least 1, got {self.local_steps!r}"
            )
        settings: dict[str, Any] = {"tau": tau, "scope": "row"}
        if self.solver != "distributediht":
            settings["local_steps"] = self.local_steps
        if self.solver in PURSUIT:
            return registry.get(self.solver, batch_size=self.batch, **settings)
        settings["lr"] = rate
        if self.solver in ("fedmid", "feddualavg"):
            settings["prox"] = "hard"
        if self.batch is None:
            return registry.get(self.solver, full_batch=True, **settings)
        return registry.get(self.solver, batch_size=self.batch, **settings)

    def _train(
        self, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], moments: Moments
    ) -> np.ndarray[Any, Any]:
        """Run the rounds; return the coefficients of the problem and keep the books.

        Rows of weight 0 are as good as absent, and so are clients that have no others.
        """
        weight = y[:, 1].numpy()
        parts = [kept for rows in parts if len(kept := rows[weight[rows] > 0])]
        free = problem.width - len(problem.unpenalized["coef"])
        tau = min(self._sparsity(x.shape[1], parts), free) or 1
        method = self._method(tau, self._rate(problem, x, weight, parts))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        data = _client_data(x, y, parts)
        run = simulate(
            method,
            problem,
            data,
            self.rounds,
            seed=seed,
            participation=self.participation,
            evaluate_every=0,
        )
        self._book(run, moments, len(parts))
        _say_if_diverged(problem, data, run.model.params)
        return run.model.params["coef"].numpy().copy()

    def _rate(self, problem: GLM, x: Any, weight: Array, parts: list[Indices]) -> float:
        """Return the step size: as given, 1 / L, or the 1 / (6 l) of Fed-HT's theory."""
        if self.solver in PURSUIT:
            return 1.0  # matching pursuit has no step size
        if self.lr is not None and self.lr != "theory":
            try:
                return float(self.lr)
            except (TypeError, ValueError):
                raise ValueError(
                    f"lr must be a number, 'theory' or None, got {self.lr!r}"
                ) from None
        curvature = problem.datafit.smoothness * smoothness(x, weight, parts, self.fit_intercept)
        steepest = (curvature + problem.l2) * (6 if self.lr == "theory" else 1)
        return 1 / steepest if steepest > 0 else 1.0

    def _book(self, run: Run, moments: Moments, clients: int) -> None:
        names = ("round", "trained", "bytes_up", "bytes_down", "dropped", "metrics")
        self.history_ = [{name: record[name] for name in names} for record in run.metrics]
        self.n_iter_ = len(run.metrics)
        self.bytes_up_ = run.bytes_up + moments.bytes_up
        self.bytes_down_ = run.bytes_down + moments.bytes_down
        if self.dictionary is not None:  # every client learns it once, before the first round
            self.dictionary_bytes_ = clients * wire.size(self._announcement(self.dictionary))
            self.bytes_down_ += self.dictionary_bytes_

    def _announcement(self, dictionary: Any) -> dict[str, torch.Tensor]:
        """Return the message that tells a client the dictionary: atoms, or how to draw them."""
        if isinstance(dictionary, RandomDictionary):
            kind = 0 if dictionary.kind == "orthonormal" else 1
            numbers = [kind, dictionary.features, dictionary.atoms, dictionary.seed]
            return {"dictionary": torch.tensor(numbers)}
        return {"dictionary": _matrix(dictionary)}

    def _atoms(self) -> torch.Tensor | None:
        if isinstance(self.dictionary, RandomDictionary):
            return self.dictionary.draw()
        return None if self.dictionary is None else _matrix(self.dictionary)

    def _kept(self, width: int) -> tuple[int, ...]:
        keep = np.asarray(self.keep)
        if keep.dtype == bool and keep.shape == (width,):
            keep = np.flatnonzero(keep)
        if keep.ndim != 1 or (keep.size and not np.issubdtype(keep.dtype, np.integer)):
            raise ValueError(
                f"keep must list positions of features, or be a mask of all {width}; got "
                f"{self.keep!r}"
            )
        places = tuple(int(position) for position in keep)
        outside = [position for position in places if not 0 <= position < width]
        if outside:
            raise ValueError(f"keep names feature {outside[0]}, but there are 0 .. {width - 1}")
        if places and self.dictionary is not None:
            raise ValueError("keep names features, but with a dictionary atoms are selected")
        return places

    def _say_what_cannot_be_kept(self, x: Any, kept: tuple[int, ...]) -> None:
        """Warn of columns that are zero after centring: they cannot be in the support."""
        if gone := [position for position in kept if not abs(x[:, position]).sum()]:
            why = "constant and thus no different from the intercept"
            if not self.fit_intercept:
                why = "zero in every row"
            elif getattr(self, "center", "global") == "client":
                why = "constant in every client and thus no different from its intercept"
            warnings.warn(
                f"keep names feature {gone[0]}, which is {why}: it gets the coefficient 0 and is "
                "not in support_",
                UserWarning,
                stacklevel=3,
            )


def whole(value: Any) -> bool:
    """Tell whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def owners(groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], Indices]:
    """Return the names of the clients and whose each row is; without groups there is one."""
    if groups is None:
        return np.array([0]), np.zeros(rows, np.int64)
    if isinstance(groups, list | tuple) and len({isinstance(name, str) for name in groups}) > 1:
        groups = np.array(groups, dtype=object)  # NumPy would make text of numbers, and merge them
    ids = np.asarray(groups)
    if ids.shape != (rows,):
        raise ValueError(
            f"groups must name the client of each of the {rows} rows, got shape {ids.shape}"
        )
    if any(name is None or name != name for name in ids.tolist()):
        raise ValueError("groups has missing values; every row needs a client")
    try:
        names, owner = np.unique(ids, return_inverse=True)
    except TypeError:
        kinds = sorted({type(name).__name__ for name in ids.tolist()})
        raise ValueError(
            f"groups mixes names of types that have no order ({', '.join(kinds)}); make them all "
            "text or all numbers"
        ) from None
    return names, owner


def _say_if_diverged(problem: GLM, data: ClientData, params: Params) -> None:
    """Warn of a model that fits worse than none: clients can add up the two losses."""
    weight = torch.ones(len(data.y), dtype=problem.dtype)
    rows = Batch(as_design(data.x), data.y, weight, torch.tensor(True), torch.tensor(0))
    nothing = {name: torch.zeros_like(value) for name, value in params.items()}
    loss, null = (float(problem.loss(model, rows)) for model in (params, nothing))
    if not loss <= 2 * null:
        cure = "take a smaller lr, or a larger l2"
        if not problem.datafit.quadratic:
            cure += (
                ", or a solver that does not look for each client's minimiser, such as 'fedht': "
            )
            cure += "where a client has one class only there is none"
        warnings.warn(
            f"the coefficients fit worse than none at all (loss {loss:.3g} against {null:.3g}): "
            f"the run diverged, so do not trust the support; {cure}",
            ConvergenceWarning,
            stacklevel=4,
        )


def _matrix(dictionary: Any) -> torch.Tensor:
    expected = "dictionary must be a finite matrix [features, atoms] or a `RandomDictionary`"
    try:
        atoms = np.array(dictionary, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{expected}, got {dictionary!r}") from None
    if atoms.ndim != 2 or not atoms.size or not np.isfinite(atoms).all():
        raise ValueError(f"{expected}, got an array of shape {atoms.shape}")
    return torch.from_numpy(atoms)


def _client_data(x: Any, y: torch.Tensor, parts: list[Indices]) -> ClientData:
    nobody = Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(len(parts), np.int64))
    design: Any = x if sparse.issparse(x) else torch.from_numpy(np.ascontiguousarray(x))
    profiles = tuple({"importance": float(y[rows, 1].mean())} for rows in parts)
    return ClientData(design, y, Ragged.of(parts), nobody, nobody, profiles, name="estimator")
