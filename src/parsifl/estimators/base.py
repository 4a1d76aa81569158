"""What the estimators share: sites from groups, standardisation, solvers, original units."""

from __future__ import annotations

import contextlib
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from parsifl import wire
from parsifl.algorithms.fedbestsubset import FedBestSubset
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import ConfigError, unknown
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.simulate import simulate
from parsifl.estimators.exact import Certificate, ExactFit, Sites, exact_fit
from parsifl.estimators.inference import Columns, Inference, information_criteria, table
from parsifl.estimators.moments import Array, Indices, Moments, centred, scaled, smoothness
from parsifl.estimators.refit import pooled_refit
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.dictionary import RandomDictionary
from parsifl.solvers.best_subset import Phase

PURSUIT = ("fedgradmp", "inexactfedgradmp")
PAPERS = (*PURSUIT, "fedht", "fediterht", "distributediht", "fedmid", "feddualavg")
SOLVERS = ("auto", "exact", *PAPERS)
_ROUNDS = 20
_EXACT_ROUNDS = 60
_SETTLED = 1e-3
_RECORDED = ("round", "trained", "bytes_up", "bytes_down", "dropped", "info")


class FederatedSparse(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Abstract base of the estimators."""

    _papers = True
    """Whether the solvers of the papers fit this model too."""

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
        participation: float = 1.0,
        random_state: Any = None,
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
        self.participation = participation
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # ------------------------------------------------------------------ settings and data
    def _setting(self, name: str, default: Any) -> Any:
        """Return a parameter that not every estimator has."""
        return getattr(self, name, default)

    def _clients(self, groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], list[Indices]]:
        """Return the names of the sites and the rows of each."""
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

    def _check_center(self) -> bool:
        """Return whether every site has an intercept of its own."""
        center = self._setting("center", "global")
        if center not in ("global", "client"):
            raise ValueError(f"center must be 'global' or 'client', got {center!r}")
        if center == "client" and not self.fit_intercept:
            raise ValueError("center='client' gives every site an intercept: set fit_intercept")
        return bool(center == "client")

    def _width(self, features: int) -> int:
        """Return how many coefficients there are to choose from: of features, or of atoms."""
        given = self._setting("dictionary", None)
        if given is None:
            return features
        return given.atoms if isinstance(given, RandomDictionary) else int(_matrix(given).shape[1])

    def _sparsity(self, features: int) -> int:
        """Return tau: how many units may be chosen."""
        given: Any = self.n_nonzero_coefs
        width = self._width(features)
        if given is None:
            given = max(int(0.1 * width), 1)
        least = 0 if np.size(self.keep) else 1
        if not whole(given) or not least <= int(given) <= width:
            kind = "features" if self._setting("dictionary", None) is None else "atoms"
            raise ValueError(
                f"n_nonzero_coefs must be a number between 1 and {width} {kind}, got {given!r}"
            )
        return int(given)

    def _say_if_few_rows(self, tau: int, width: int, parts: list[Indices]) -> None:
        few = sum(len(rows) < min(3 * tau, width) for rows in parts)
        if few and self.solver_ in PURSUIT and len(parts) > 1:
            warnings.warn(
                f"{few} of {len(parts)} clients have fewer rows than 3 x {tau} coefficients: they "
                "take the minimiser nearest to the model that they received",
                UserWarning,
                stacklevel=5,
            )

    def _units(self, width: int) -> tuple[int, ...]:
        """Return the unit of each column, numbered from 0; empty if every column is one."""
        given = self._setting("column_groups", None)
        if given is None:
            return ()
        labels = np.asarray(given)
        if labels.shape != (width,):
            raise ValueError(
                f"column_groups must name the group of each of the {width} columns, got shape "
                f"{labels.shape}"
            )
        return tuple(np.unique(labels, return_inverse=True)[1].tolist())

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
        if places and self._setting("dictionary", None) is not None:
            raise ValueError("keep names features, but with a dictionary atoms are selected")
        return places

    def _standardised(self, x: Any, moments: Moments) -> tuple[Any, Array]:
        """Return the features in standard units, for a problem with an intercept, and the means.

        A CSR matrix is not centred, and nothing is where there is no intercept.
        """
        if sparse.issparse(x):
            found = scaled(x, moments, intercept=bool(self.fit_intercept))
            return found, np.zeros_like(moments.mean)
        if not self.fit_intercept:
            return x / moments.scale, np.zeros_like(moments.mean)
        return centred(x, moments) / moments.scale, moments.mean

    def _with_common_intercept(
        self, found: Array, problem: GLM, x: Any, y: torch.Tensor, sites: int
    ) -> Array:
        """Put the intercept that fits all rows best in the place of those that sites keep."""
        rows = Rows(as_design(x if sparse.issparse(x) else torch.from_numpy(x)), y, torch.ones(1))
        fit = problem.with_own_intercept({"coef": torch.from_numpy(found)}, rows)
        self.bytes_up_ += 16 * 8 * sites  # slope and curvature, in about eight Newton steps
        return np.array(fit["coef"].numpy())

    def _say_what_cannot_be_kept(self, x: Any, kept: tuple[int, ...]) -> None:
        """Warn of columns that are zero after centring: they cannot be in the support."""
        if gone := [position for position in kept if not abs(x[:, position]).sum()]:
            why = "constant and thus no different from the intercept"
            if not self.fit_intercept:
                why = "zero in every row"
            elif self._setting("center", "global") == "client":
                why = "constant in every client and thus no different from its intercept"
            warnings.warn(
                f"keep names feature {gone[0]}, which is {why}: it gets the coefficient 0 and is "
                "not in support_",
                UserWarning,
                stacklevel=3,
            )

    # ------------------------------------------------------------------ the choice of a solver
    def _choose(self, problem: Any, tau: int, *, own_intercept: bool) -> None:
        """Set `solver_` and `solver_reason_`."""
        known = SOLVERS if self._papers else ("auto", "exact")
        if self.solver not in known:
            raise ConfigError(unknown("solver", str(self.solver), known))
        self._check_local_steps()
        if not whole(self.max_bytes) or self.max_bytes < 1:
            raise ValueError(f"max_bytes must be a whole number above 0, got {self.max_bytes!r}")
        obstacle = self._obstacle(problem, tau)
        if self.solver in PAPERS:
            self.solver_, self.solver_reason_ = self.solver, "as asked"
        elif self.solver == "exact" or not self._papers:
            if obstacle:
                raise ValueError(f"solver='exact' cannot be used: {obstacle}")
            self.solver_, self.solver_reason_ = "exact", "as asked"
        elif obstacle:
            self.solver_, self.solver_reason_ = "fedgradmp", obstacle
        else:
            size = self._algorithm(problem, tau).upload_bytes(
                problem.width, tau + len(problem.unpenalized["coef"]), quadratic=problem.quadratic
            )
            self.solver_ = "exact"
            self.solver_reason_ = (
                f"a site's upload of {size} bytes a round is within max_bytes={self.max_bytes}"
            )
        if self.solver_ != "exact" and own_intercept:
            raise ValueError(
                f"center='client' needs solver='exact' here; solver={self.solver_!r} takes it for "
                "dense linear regression only"
            )
        if self.solver_ != "exact" and self._units(problem.width - problem.intercept):
            raise ValueError("column_groups needs solver='exact'")

    def _obstacle(self, problem: Any, tau: int) -> str:
        """Return why the lossless solver cannot be used; empty if it can."""
        if isinstance(problem, GLM) and problem.datafit.name == "softmax":
            return "softmax has a vector of coefficients for each class"
        if self._setting("participation", 1.0) != 1:
            return "participation is below 1, and sums over different sites cannot be compared"
        if self._setting("batch_size", None) is not None:
            return "batch_size asks for mini-batches"
        algorithm, always = self._algorithm(problem, tau), len(problem.unpenalized["coef"])
        size = algorithm.upload_bytes(problem.width, tau + always, quadratic=problem.quadratic)
        beside = algorithm.beside(problem.width, tau + always, quadratic=problem.quadratic)
        few = tau > 0 and beside < min(tau + 5, problem.width - tau - always)
        if size > self.max_bytes or few:
            return (
                f"a site would upload {size} bytes in a round, for only {beside} candidates; "
                f"max_bytes={self.max_bytes} is too few"
            )
        return ""

    def _algorithm(self, problem: Any, tau: int, *, own_intercept: bool = False) -> FedBestSubset:
        return FedBestSubset(
            tau=tau,
            max_bytes=int(self.max_bytes),
            intercepts="own" if own_intercept else "shared",
            units=self._units(problem.width - problem.intercept),
        )

    # ------------------------------------------------------------------ training
    def _train(
        self,
        problem: Any,
        x: Any,
        y: torch.Tensor,
        parts: list[Indices],
        moments: Moments,
        *,
        start: float = 0.0,
        own_intercept: bool = False,
    ) -> np.ndarray[Any, Any]:
        """Fit; return the coefficients of the problem and keep the books.

        Rows of weight 0 are as good as absent, and so are sites that have no others.
        """
        weight = y[:, -1].numpy()
        parts = [kept for rows in parts if len(kept := rows[weight[rows] > 0])]
        free = problem.width - len(problem.unpenalized["coef"])
        tau = min(self._sparsity(x.shape[1]), free)
        self._choose(problem, tau, own_intercept=own_intercept)
        if self.solver_ == "exact":
            return self._train_exactly(
                problem, x, y, parts, moments, tau, start=start, own_intercept=own_intercept
            )
        return self._train_as_published(problem, x, y, parts, moments, max(tau, 1))

    def _train_exactly(
        self,
        problem: Any,
        x: Any,
        y: torch.Tensor,
        parts: list[Indices],
        moments: Moments,
        tau: int,
        *,
        start: float,
        own_intercept: bool,
    ) -> Array:
        first = np.zeros(problem.width)
        if problem.intercept and not own_intercept:
            first[-1] = start
        algorithm = self._algorithm(problem, tau, own_intercept=own_intercept)
        sites = Sites.of(x, y, parts)
        fit = exact_fit(algorithm, problem, sites, first, rounds=self._rounds(_EXACT_ROUNDS))
        self._exact: ExactFit | None = fit
        self.history_, self.n_iter_ = fit.history, len(fit.history)
        self.bytes_up_ = fit.bytes_up + moments.bytes_up
        self.bytes_down_ = fit.bytes_down + moments.bytes_down
        self.loss_ = fit.search.loss / fit.search.rows
        self._book_dictionary(len(parts))
        self._say_how_it_ended(fit)
        return np.array(fit.search.coefficients)

    def _say_how_it_ended(self, fit: ExactFit) -> None:
        if fit.search.phase == Phase.SEPARATED:
            warnings.warn(
                "the selected columns separate the classes (or the events): the likelihood has no "
                "maximum, coefficients and standard errors only show where the search stopped; "
                "set l2, for example to 0.01",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif fit.search.phase == Phase.STALLED:
            warnings.warn(
                "the search stopped where rounding leaves no further decrease of the loss",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif fit.search.phase < Phase.CONVERGED:
            warnings.warn(
                f"the search did not end within rounds={self._rounds(_EXACT_ROUNDS)}; the "
                "coefficients are those with the least loss so far",
                ConvergenceWarning,
                stacklevel=6,
            )

    def _rounds(self, default: int) -> int:
        if self.rounds is None:
            return default
        if not whole(self.rounds) or self.rounds < 1:
            raise ConfigError(f"rounds must be a whole number and at least 1, got {self.rounds!r}")
        return int(self.rounds)

    def _train_as_published(
        self,
        problem: GLM,
        x: Any,
        y: torch.Tensor,
        parts: list[Indices],
        moments: Moments,
        tau: int,
    ) -> np.ndarray[Any, Any]:
        """Run a solver of the papers, keep its best round, and refit on the support."""
        weight = y[:, -1].numpy()
        if self.l2 is None and problem.datafit.classes:
            problem = problem.with_l2(1e-3)  # a site's classes may be separable
        self._say_if_few_rows(tau, self._width(x.shape[1]), parts)
        method, servers = _watched(self._method(tau, self._rate(problem, x, weight, parts)))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        data = _client_data(x, y, parts)
        self.history_ = []

        def progress(record: Any) -> None:
            params = _params(method, problem, servers[-1])
            used = np.atleast_2d(params["coef"].numpy()).any(axis=0)
            kept = {name: record[name] for name in _RECORDED}
            kept["loss"] = _loss(problem, data, params)
            kept["support"] = np.flatnonzero(used).tolist()
            self.history_.append(kept)
            if self._steady() and _settled(self.history_, 1e-8):
                raise _SettledError

        with contextlib.suppress(_SettledError):
            simulate(
                method,
                problem,
                data,
                self._rounds(_ROUNDS),
                seed=seed,
                participation=self.participation,
                evaluate_every=0,
                progress=progress,
            )
        self.n_iter_ = len(self.history_)
        losses = np.array([record["loss"] for record in self.history_])
        best = int(np.where(np.isfinite(losses), losses, np.inf).argmin())
        # every site reports its loss after every round: one number
        sent = sum(record["bytes_up"] for record in self.history_)
        self.bytes_up_ = sent + moments.bytes_up + 8 * len(parts) * self.n_iter_
        received = sum(record["bytes_down"] for record in self.history_)
        self.bytes_down_ = received + moments.bytes_down
        self._book_dictionary(len(parts))
        found = np.array(_params(method, problem, servers[best])["coef"].numpy())
        self._exact = None
        if self.refit:
            found = self._refitted(found, problem, x, y, parts)
        self.loss_ = _loss(problem, data, {"coef": torch.from_numpy(found)})
        self._say_if_unsettled(problem, data, losses)
        return found

    def _refitted(
        self, found: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices]
    ) -> Array:
        """Replace the coefficients on the support by the pooled fit, from sums."""
        ridge = self.l2 or 0.0
        values, sent, received, phase = pooled_refit(found, problem, x, y, parts, ridge)
        self.bytes_up_ += sent
        self.bytes_down_ += received
        if phase == Phase.SEPARATED:
            ridge = ridge or problem.l2  # that of the solver's own iterations
            values, sent, received, _ = pooled_refit(found, problem, x, y, parts, ridge)
            self.bytes_up_ += sent
            self.bytes_down_ += received
            warnings.warn(
                "the selected columns separate the classes: the likelihood has no maximum, and "
                f"the coefficients are those with l2={ridge:g}; set l2 yourself",
                ConvergenceWarning,
                stacklevel=6,
            )
        return values

    def _say_if_unsettled(self, problem: GLM, data: ClientData, losses: Array) -> None:
        """Warn of a fit worse than none, or of rounds that had not settled."""
        null = _loss(problem, data, problem.init(Key(0)))
        gradient = self.solver_ not in PURSUIT
        cure = "take a smaller lr" if gradient and self.lr is not None else "take solver='exact'"
        if not self.loss_ <= 2 * null or not losses[-1] <= 2 * max(null, losses[0]):
            warnings.warn(
                f"the run diverged (loss {losses[-1]:.3g} in the last round, {null:.3g} without "
                f"any coefficient): do not trust the support; {cure}, or a larger l2",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif len(losses) > 2 and self._steady() and not _settled(self.history_, _SETTLED):
            warnings.warn(
                f"the loss had not settled after rounds={len(losses)}; the best round is kept; "
                "take more rounds, or solver='exact'",
                ConvergenceWarning,
                stacklevel=6,
            )

    def _steady(self) -> bool:
        """Return whether every round reads all rows of all sites, so that its loss can settle."""
        return bool(self.participation == 1 and self.batch_size is None)

    def _check_local_steps(self) -> None:
        steps = self._setting("local_steps", 1)
        if not whole(steps) or steps < 1:
            raise ConfigError(f"local_steps must be a whole number and at least 1, got {steps!r}")

    def _method(self, tau: int, rate: float) -> AnyAlgorithm:
        settings: dict[str, Any] = {"tau": tau, "scope": "row"}
        if self.solver_ != "distributediht":
            settings["local_steps"] = self.local_steps
        if self.solver_ in PURSUIT:
            return registry.get(self.solver_, batch_size=self.batch_size, **settings)
        settings["lr"] = rate
        if self.solver_ in ("fedmid", "feddualavg"):
            settings["prox"] = "hard"
        if self.batch_size is None:
            return registry.get(self.solver_, full_batch=True, **settings)
        return registry.get(self.solver_, batch_size=self.batch_size, **settings)

    def _rate(self, problem: GLM, x: Any, weight: Array, parts: list[Indices]) -> float:
        """Return the step size: as given, 1 / L, or the 1 / (6 l) of Fed-HT's theory."""
        if self.solver_ in PURSUIT:
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

    # ------------------------------------------------------------------ a dictionary
    def _book_dictionary(self, clients: int) -> None:
        dictionary = self._setting("dictionary", None)
        if dictionary is not None:  # every site learns it once, before the first round
            self.dictionary_bytes_ = clients * wire.size(self._announcement(dictionary))
            self.bytes_down_ += self.dictionary_bytes_

    def _announcement(self, dictionary: Any) -> dict[str, torch.Tensor]:
        """Return the message that brings a site the dictionary: atoms, or how to draw them."""
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

    # ------------------------------------------------------------------ what can be said
    def _fitted_exactly(self, what: str) -> ExactFit:
        check_is_fitted(self)
        if self._exact is None:
            raise ValueError(
                f"{what} needs solver='exact'; this fit used {self.solver_!r}, which does not sum "
                "up curvature"
            )
        return self._exact

    @property
    def certificate_(self) -> Certificate:
        """How far from optimal the support can be: proven for a squared loss with few columns."""
        return self._fitted_exactly("certificate_").certificate

    def information_criteria(self, *, gamma: float = 1.0) -> dict[str, float]:
        """Return the log-likelihood, AIC, BIC, EBIC (with `gamma`) and GIC of the fit."""
        fit = self._fitted_exactly("information_criteria()")
        return information_criteria(fit, self._family(), gamma)

    def summary(self, *, level: float = 0.95) -> Inference:
        """Return the table of coefficients, by site too, and which guarantee holds.

        Standard errors and intervals are given if no column was selected by these rows, that is
        if `n_nonzero_coefs=0` and `keep` names the model, or if all columns are in it. For a
        selected model use `split_inference`, `post_double_selection` or `stability_selection`.
        """
        fit = self._fitted_exactly("summary()")
        if self._setting("dictionary", None) is not None:
            raise ValueError("summary() is about features, and with a dictionary atoms are chosen")
        selected = (
            0
            < self._sparsity(self.n_features_in_)
            < self.n_features_in_ - len(set(self._kept(self.n_features_in_)))
        )
        return table(fit, self._columns, self._family(), selected=selected, level=level)

    def _family(self) -> str:
        raise NotImplementedError

    def _note(
        self,
        mean: Array,
        scale: Array,
        centred: Literal["", "global", "client"] = "",
        target: float = 0.0,
        constant: float = 0.0,
    ) -> None:
        """Keep what takes coefficients from standardised units to those of X."""
        sites = [str(name) for name in self.clients_]
        implied = centred == "global"
        self._columns = Columns(self._names(), sites, mean, scale, implied, target)
        if self._exact is not None:
            self._exact = replace(self._exact, centred=centred, constant=constant)

    def _names(self) -> list[str]:
        given = getattr(self, "feature_names_in_", None)
        if given is not None:
            return [str(name) for name in given]
        return [f"x{number}" for number in range(self.n_features_in_)]


def whole(value: Any) -> bool:
    """Tell whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def owners(groups: Any, rows: int) -> tuple[np.ndarray[Any, Any], Indices]:
    """Return the names of the sites and whose each row is; without groups there is one."""
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


def _watched(method: AnyAlgorithm) -> tuple[AnyAlgorithm, list[Any]]:
    """Return the method and a list that will hold the server state after every round."""
    servers: list[Any] = []
    kind: Any = type(method)

    def aggregate(self: Any, problem: Any, server: Any, total: Any, key: Any) -> Any:
        found = kind.aggregate(self, problem, server, total, key)
        servers.append(found)
        return found

    watched = type(kind.__name__, (kind,), {"aggregate": aggregate, "__doc__": kind.__doc__})
    return watched(**vars(method)), servers


class _SettledError(Exception):
    """Ends a run whose loss and support no longer change."""


def _settled(history: list[dict[str, Any]], tolerance: float) -> bool:
    """Tell whether the last three rounds agree in their loss."""
    last = history[-3:]
    losses = np.array([record["loss"] for record in last])
    if len(last) < 3 or not np.isfinite(losses).all():
        return False
    return bool(np.ptp(losses) <= tolerance * max(abs(float(losses.min())), 1e-12))


def _params(method: AnyAlgorithm, problem: GLM, server: Any) -> Params:
    model = method.model(problem, server)
    if model is None:
        raise ConfigError(f"{type(method).__name__} has no common model")
    return model.params


def _loss(problem: GLM, data: ClientData, params: Params) -> float:
    """Return the mean loss over all rows: sites can add up their parts."""
    weight = torch.ones(len(data.y), dtype=problem.dtype)
    rows = Batch(as_design(data.x), data.y, weight, torch.tensor(True), torch.tensor(0))
    return float(problem.loss(params, rows))


def _matrix(dictionary: Any) -> torch.Tensor:
    expected = "dictionary must be a finite matrix [features, atoms] or a `RandomDictionary`"
    try:
        atoms = np.array(dictionary, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{expected}, got {dictionary!r}") from None
    if atoms.ndim != 2 or not atoms.size or not np.isfinite(atoms).all():
        raise ValueError(f"{expected}, got an array of shape {atoms.shape}")
    return torch.from_numpy(atoms)


def _client_data(x: Any, y: torch.Tensor, parts: Sequence[Indices]) -> ClientData:
    nobody = Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(len(parts), np.int64))
    design: Any = x if sparse.issparse(x) else torch.from_numpy(np.ascontiguousarray(x))
    profiles = tuple({"importance": float(y[rows, 1].mean())} for rows in parts)
    return ClientData(design, y, Ragged.of(parts), nobody, nobody, profiles, name="estimator")
