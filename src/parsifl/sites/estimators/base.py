"""Shared parts of the estimators: choice of the solver, the lossless solver, and summaries."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from parsifl.core import config
from parsifl.core.errors import ConfigError, ParsiflWarning, unknown
from parsifl.sites.estimators.exact import ExactFit, Sites, certified, exact_fit
from parsifl.sites.estimators.export import Missing, as_sklearn
from parsifl.sites.estimators.moments import Array, Indices, Moments
from parsifl.sites.estimators.published import PAPERS, PublishedSolvers
from parsifl.sites.estimators.settings import whole
from parsifl.sites.estimators.site_fits import Intercept, site_fits
from parsifl.sites.inference import (
    FIXED,
    SELECTED,
    Columns,
    information_criteria,
    table,
    was_selected,
)
from parsifl.sites.search.certificate import Certificate
from parsifl.sites.search.fedbestsubset import FedBestSubset
from parsifl.sites.search.subset_state import Phase
from parsifl.sites.standard_errors import Errors, dependence, removals, undetermined
from parsifl.sites.summary import Inference

SOLVERS = ("auto", "exact", *PAPERS)
_EXACT_ROUNDS = 60
_MODELS = {
    "gaussian": "linear regression",
    "binomial": "logistic regression",
    "poisson": "Poisson regression",
    "cox": "Cox regression, stratified by site, with {ties} ties,",
}


class FederatedSparse(PublishedSolvers):
    """Abstract base of the estimators."""

    _papers = True
    """Whether the solvers of the papers support this model."""
    _interim = False
    """Whether the fit only selects, for another fit: it has no site estimates, and some warnings
    about the selection are left to the user's own fits."""

    _tuned = False
    """Whether cross-validation over the same rows chose the number of terms."""

    # ------------------------------------------------------------------ the choice of a solver
    def _choose(self, problem: Any, tau: int, *, own_intercept: bool) -> None:
        """Set `solver_` and `solver_reason_`."""
        known = SOLVERS if self._papers else ("auto", "exact")
        if self.solver not in known:
            raise ConfigError(unknown("solver", str(self.solver), known))
        self._check_local_steps()
        if not whole(self.max_bytes) or self.max_bytes < 1:
            raise ValueError(f"max_bytes must be a whole number above 0, got {self.max_bytes!r}")
        if not whole(self.certificate_rounds) or self.certificate_rounds < 0:
            raise ValueError(
                f"certificate_rounds must be a whole number, got {self.certificate_rounds!r}"
            )
        nodes = self._setting("certificate_nodes", None)
        if nodes is not None and (not whole(nodes) or nodes < 1):
            raise ValueError(
                f"certificate_nodes must be a whole number of at least 1, or None, got {nodes!r}"
            )
        obstacle = self._obstacle(problem, tau)
        if self.solver in PAPERS:
            self.solver_, self.solver_reason_ = self.solver, "as asked"
        elif self.solver == "exact" or not self._papers:
            if obstacle:
                raise ValueError(f"solver='exact' cannot be used: {obstacle}")
            self.solver_, self.solver_reason_ = "exact", "as asked"
        elif obstacle:  # a site of one class has no minimiser, which matching pursuit looks for
            self.solver_ = "fedht" if problem.datafit.classes else "fedgradmp"
            self.solver_reason_ = obstacle
        else:
            size = self._algorithm(problem, tau).upload_bytes(
                problem.width, tau + len(problem.unpenalized["coef"]), quadratic=problem.quadratic
            )
            self.solver_ = "exact"
            self.solver_reason_ = (
                f"a site's upload of {size} bytes per round is within max_bytes={self.max_bytes}"
            )
        if self.solver_ != "exact" and own_intercept:
            raise ValueError(
                f"center='client' needs solver='exact' here; solver={self.solver_!r} supports it "
                "only for dense linear regression"
            )
        if self.solver_ != "exact" and self._setting("column_groups", None) is not None:
            raise ValueError("column_groups needs solver='exact'")

    def _obstacle(self, problem: Any, tau: int) -> str:
        """Return why the lossless solver cannot be used; empty if it can."""
        datafit = getattr(problem, "datafit", None)  # a Cox model has none
        if datafit is not None and datafit.name == "softmax":
            return (
                "softmax has a vector of coefficients for each class; scikit-learn's "
                "OneVsRestClassifier fits a logistic regression of each class against the rest"
            )
        if self._setting("participation", 1.0) != 1:
            return "participation is below 1, and sums over different sites cannot be compared"
        if self._setting("batch_size", None) is not None:
            return "batch_size requests mini-batches"
        algorithm, always = self._algorithm(problem, tau), len(problem.unpenalized["coef"])
        size = algorithm.upload_bytes(problem.width, tau + always, quadratic=problem.quadratic)
        beside = algorithm.beside(problem.width, tau + always, quadratic=problem.quadratic)
        few = tau > 0 and beside < min(tau + 5, problem.width - tau - always)
        if size > self.max_bytes or few:
            return (
                f"a site would upload {size} bytes per round for only {beside} candidates; "
                f"max_bytes={self.max_bytes} is too small"
            )
        return ""

    def _algorithm(self, problem: Any, tau: int, *, own_intercept: bool = False) -> FedBestSubset:
        settings: dict[str, Any] = {
            "tau": tau,
            "max_bytes": int(self.max_bytes),
            "intercepts": "own" if own_intercept else "shared",
            "units": self._units(problem.width - problem.intercept),
        }
        options = self._options() if self.solver in ("auto", "exact") else {}
        return config.build(FedBestSubset, {**settings, **options})

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
        """Fit; return the coefficients of the problem and record rounds and bytes.

        Rows of weight 0 are ignored, and so are sites without other rows.
        """
        weight = y[:, getattr(problem, "weight_column", 1)].numpy()
        parts = [weighted for rows in parts if len(weighted := rows[weight[rows] > 0])]
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
        fit = replace(fit, nodes=self._setting("certificate_nodes", None))
        if self.certificate_rounds and not fit.one_shot:
            fit = certified(fit, algorithm, problem, sites, int(self.certificate_rounds))
        if not self._interim and self._setting("dictionary", None) is None:
            kind = self._intercept_kind()
            by_site = site_fits(problem, sites.rows, fit.search.coefficients, fit.columns, kind)
            fit, self.summary_bytes_ = replace(fit, by_site=by_site), by_site.bytes_up
        self._exact: ExactFit | None = fit
        self.history_, self.n_iter_ = fit.history, len(fit.history)
        self.bytes_up_ = fit.bytes_up + moments.bytes_up + self._agreement_bytes[0]
        self.bytes_down_ = fit.bytes_down + moments.bytes_down + self._agreement_bytes[1]
        self.loss_ = fit.search.loss / fit.search.rows
        self._book_dictionary(len(parts))
        self._say_how_it_ended(fit)
        rows = sum(len(part) for part in parts)
        count = len(fit.columns) + self._further_intercepts(problem, len(parts))
        if tau and count >= rows:
            warnings.warn(
                f"n_nonzero_coefs={self.n_nonzero_coefs} gives {count} coefficients "
                f"(including intercepts) to {rows} rows: the fit interpolates them and does not "
                "generalize; use fewer coefficients, or set l2",
                UserWarning,
                stacklevel=5,
            )
        else:
            self._say_if_dependent(fit)
            self._say_if_factors_gain_little(fit)
        return np.array(fit.search.coefficients)

    def _intercept_kind(self) -> Intercept:
        if self._family() == "cox" or not self.fit_intercept:
            return "none"
        return "own" if self._setting("center", "global") == "client" else "shared"

    def _further_intercepts(self, problem: Any, sites: int) -> int:
        """Return the number of intercepts that are not among the columns of the fit."""
        if self._family() == "cox" or not self.fit_intercept:
            return 0
        if self._setting("center", "global") == "client":
            return sites
        return 0 if problem.intercept else 1

    def _say_if_pooled(self, groups: Any) -> None:
        """Warn that all rows count as one site if the result depends on sites."""
        if groups is not None:
            return
        why = ""
        if self.solver_ != "exact":
            why = f"solver={self.solver_!r} averages the models of sites"
        elif self._family() == "cox":
            why = "each site has its own baseline hazard"
        elif self._setting("center", "global") == "client":
            why = "center='client' gives each site its own intercept"
        elif self._setting("site_variances", False):
            why = "site_variances=True gives each site its own variance"
        if why:
            warnings.warn(
                f"groups=None: all rows count as one site, but {why}. Pass groups=..., the site of "
                "each row; the same value in every row if there is one site. In GridSearchCV and "
                "similar searches, route it with set_fit_request(groups=True)",
                ParsiflWarning,
                stacklevel=3,
            )

    def _say_how_it_ended(self, fit: ExactFit) -> None:
        if fit.search.phase == Phase.SEPARATED:
            warnings.warn(
                "the selected columns separate the classes (or the events): the likelihood has no "
                "maximum, and coefficients and standard errors depend on where the search stopped; "
                "set l2, for example to 0.01",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif fit.search.phase == Phase.STALLED:
            warnings.warn(
                "the search stopped because rounding prevents a further decrease of the loss",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif fit.search.phase < Phase.CONVERGED:
            warnings.warn(
                f"the search did not converge within rounds={self._rounds(_EXACT_ROUNDS)}; the "
                "coefficients are those with the smallest loss so far",
                ConvergenceWarning,
                stacklevel=6,
            )

    def _say_if_dependent(self, fit: ExactFit) -> None:
        """Warn about columns of the model whose coefficients the rows do not determine."""
        if self._setting("dictionary", None) is not None or fit.search.phase == Phase.SEPARATED:
            return
        used = np.diagonal(fit.information.sum(0)) > 0  # other columns have a warning of their own
        positions = fit.columns[undetermined(fit).any(axis=1) & used]
        names = [name for position, name in enumerate(self._names()) if position in positions]
        if len(names) > 1:
            warnings.warn(
                f"the columns {', '.join(names)} of the model {dependence(fit)}, so the sums do "
                "not determine their coefficients: those of least norm are returned, without "
                "standard errors. Remove one of the columns, or set l2",
                ParsiflWarning,
                stacklevel=6,
            )

    def _say_if_factors_gain_little(self, fit: ExactFit) -> None:
        """Warn about selected factors that noise with as many coefficients would match."""
        if self._interim or not was_selected(fit):
            return
        for label, size, drop in removals(fit, self._family()):
            asked = size * np.log(fit.rows.sum())
            if size > 1 and drop < asked:
                name = self._term(fit, label)
                warnings.warn(
                    f"the selected term {name} has {size} coefficients and lowers the deviance by "
                    f"{drop:.3g}, where BIC asks for {asked:.3g}: n_nonzero_coefs counts terms, so "
                    "a factor with many levels can replace a better column. Merge levels, leave "
                    f"{name} out, or compare information_criteria()",
                    ParsiflWarning,
                    stacklevel=6,
                )

    def _term(self, fit: ExactFit, label: int) -> str:
        """Return the name of a term: the column of a table, or the columns of a group."""
        columns = np.flatnonzero(fit.rules.labels == label)
        if self.preprocessing_ is not None:
            names = self.preprocessing_.columns
            units = dict.fromkeys(self.preprocessing_.units[column] for column in columns)
            return " + ".join(repr(names[unit].name) for unit in units)
        names_of = self._names()
        return f"{names_of[columns[0]]} .. {names_of[columns[-1]]}"

    # ------------------------------------------------------------------ what can be said
    def _fitted_exactly(self, what: str) -> ExactFit:
        check_is_fitted(self)
        if self._exact is None:
            raise ValueError(
                f"{what} needs solver='exact'; this fit used {self.solver_!r}, which does not "
                "compute curvature"
            )
        return self._exact

    @property
    def certificate_(self) -> Certificate:
        """A bound on the distance of the support from the optimum: see `certificate_rounds`."""
        return self._fitted_exactly("certificate_").certificate

    def information_criteria(self, *, gamma: float = 1.0) -> dict[str, float]:
        """Return the log-likelihood, AIC, BIC, EBIC (with `gamma`) and GIC of the fit."""
        fit = self._fitted_exactly("information_criteria()")
        return information_criteria(fit, self._family(), gamma)

    def summary(self, *, level: float = 0.95, se: Errors = "auto") -> Inference:
        """Return the table of coefficients, overall and by site, with its guarantee.

        Standard errors and intervals are given if no column was selected by these rows, that is
        if `n_nonzero_coefs=0` and `keep` names the model, or if all columns are in it. For a
        selected model use `split_inference`, `post_double_selection` or `stability_selection`.

        Parameters
        ----------
        level
            The level of the intervals.
        se
            "model" uses the observed information; it holds if the model does. "robust" (HC1, for
            Cox models that of Lin and Wei) and "HC0", without its factor n / (n - p), hold if the
            variance differs between rows. "dispersion" scales the information by Pearson's
            dispersion (quasi-Poisson). "cluster" holds if rows of a site depend on each other; it
            uses t with one degree of freedom less than sites, and warns below 20 sites. "auto" is
            "robust" for weights of a sample (`weight_type="sampling"`), else "model".
        """
        fit = self._fitted_exactly("summary()")
        if self._setting("dictionary", None) is not None:
            raise ValueError("summary() describes features, not the atoms of a dictionary")
        return table(
            fit,
            self._columns,
            self._family(),
            selected=self._tuned or was_selected(fit),
            level=level,
            errors=se,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        """Return sentences on what is modelled, and on imputed columns."""
        notes = []
        events: int | None = getattr(self, "n_events_", None)
        if self._family() == "binomial":
            other, positive = self.classes_
            count = "" if events is None else f" ({events} rows)"
            notes.append(f"The coefficients are log odds of {positive}{count} against {other}.")
        elif events is not None:
            notes.append(f"{events} events were observed.")
        imputed: Mapping[str, float] = getattr(self, "imputed_", {})
        if imputed:
            listed = ", ".join(f"{name} ({share:.1%})" for name, share in imputed.items())
            notes.append(
                f"Missing values were replaced by the mean of the column: {listed}. Intervals "
                "ignore this and are too short: with 30 % missing at random they covered 86 % in "
                "a simulation."
            )
        return tuple(notes)

    def methods_text(self) -> str:
        """Return a paragraph for the methods section of a paper, with the numbers of this fit."""
        fit = self._fitted_exactly("methods_text()")
        ties = str(self._setting("ties", "")).capitalize() + "'s"
        kind = _MODELS[self._family()].format(ties=ties)
        names = self.get_feature_names_out()[self.support_]
        chosen = ", ".join(str(name) for name in names) or "none"
        fixed = ", on top of those that were fixed" if np.size(self.keep) else ""
        selection = (
            f"Best-subset selection allowed {fit.rules.count} of {int(fit.rules.labels.max()) + 1} "
            f"terms{fixed}"
            if self._tuned or was_selected(fit)
            else "The terms of the model were fixed in advance"
        )
        ridge = f" with a ridge penalty of {self.l2:g} in standardised units" if self.l2 else ""
        encoding = ""
        if self.preprocessing_ is not None:
            encoding = (
                " Missing numbers were replaced by the mean over all sites, missing categories "
                "were a level of their own, and the most frequent level was the reference."
            )
        return (
            f"A {kind}{self._modelled()} was fitted to {fit.rows.sum():.0f} observations at "
            f"{len(fit.rows)} sites "
            f"({fit.rows.min():.0f} to {fit.rows.max():.0f} per site){ridge}, from sums over the "
            "rows of each site (FedBestSubset in Parsifl), which gives the estimates of the pooled "
            f"data.{encoding} {selection}; the terms in the model are: {chosen}. The sites sent "
            f"{self.bytes_up_:,} bytes in {self.n_iter_} round{'s' * (self.n_iter_ != 1)}. "
            + self._absent()
            + (SELECTED if self._tuned or was_selected(fit) else FIXED)
        )

    def _modelled(self) -> str:
        """Return what a model of classes or events describes."""
        events: int | None = getattr(self, "n_events_", None)
        count = "" if events is None else f" ({events} events)"
        if self._family() == "binomial":
            return f" of {self.classes_[1]} against {self.classes_[0]}{count}"
        return count

    def _absent(self) -> str:
        """Return a sentence on sites of a deployment that were excluded, or an empty text."""
        left_out: Mapping[str, str] = getattr(self, "left_out_", {})
        if not left_out:
            return ""
        return f"Not in the fit, by the guards of the sites: {'; '.join(left_out.values())}. "

    def to_sklearn(self, *, missing: Missing = "nan") -> Any:
        """Return a fitted scikit-learn estimator with the same predictions.

        That is `LinearRegression`, `LogisticRegression` or `PoissonRegressor`, behind a
        `ColumnTransformer` if the fit was to a table. Cox regression becomes a `LinearRegression`
        of the log hazard ratio.

        Parameters
        ----------
        missing
            How new tables mark a missing word: "nan" (NaN or None, as in frames) or "empty" (an
            empty text, which ONNX and `skl2onnx` require).
        """
        check_is_fitted(self)
        return as_sklearn(self, missing)

    @abstractmethod
    def _family(self) -> str:
        """Return the name of the model's family."""

    def _note(
        self,
        mean: Array,
        scale: Array,
        centred: Literal["", "global", "client"] = "",
        target: float = 0.0,
        constant: float = 0.0,
    ) -> None:
        """Store the transformation of coefficients from standardised units to those of X."""
        sites = [str(name) for name in self.clients_]
        implied = centred == "global"
        self._columns = Columns(self._names(), sites, mean, scale, implied, target)
        if self._exact is not None:
            self._exact = replace(self._exact, centred=centred, constant=constant)
            self._note_weights()

    def _note_weights(self) -> None:
        """Store what the weights of the fit mean; a deployment has none."""
        if self._exact is not None and hasattr(self, "_weighting"):
            kind, scale, logs = self._weighting
            logs = logs if kind == "precision" else 0.0
            self._exact = replace(
                self._exact, weight_type=kind, weight_scale=scale, log_weights=logs
            )
