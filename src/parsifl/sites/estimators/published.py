"""The solvers of the papers: run rounds, keep the best one, and refit on pooled sums."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from parsifl import wire
from parsifl.core import registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.batching import Batch
from parsifl.core.errors import ConfigError, DivergenceWarning
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.simulate import simulate
from parsifl.engine.training import RoundEnd, StopTraining
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.sites.estimators.exact import ExactFit, Sites, exact_fit
from parsifl.sites.estimators.moments import Array, Indices, Moments, refit, smoothness
from parsifl.sites.estimators.settings import EstimatorSettings
from parsifl.sites.search.fedbestsubset import FedBestSubset
from parsifl.sites.search.subset_state import Phase

PURSUIT = ("fedgradmp", "inexactfedgradmp")
PAPERS = (*PURSUIT, "fedht", "fediterht", "distributediht", "fedmid", "feddualavg")
_ROUNDS = 20
_GRADIENT_ROUNDS = 60
_REFIT_ROUNDS, _FAR = 60, 25.0
_SETTLED = 1e-3
_RECORDED = ("round", "trained", "bytes_up", "bytes_down", "dropped", "metrics")


class PublishedSolvers(EstimatorSettings):
    """Abstract base: fits by the algorithms that average models."""

    _exact: ExactFit | None
    solver_: str
    history_: list[dict[str, Any]]

    def _say_if_few_rows(self, tau: int, width: int, parts: list[Indices]) -> None:
        few = sum(len(rows) < min(3 * tau, width) for rows in parts)
        if few and self.solver_ in PURSUIT and len(parts) > 1:
            warnings.warn(
                f"{few} of {len(parts)} clients have fewer rows than 3 x {tau} coefficients: they "
                "take the minimiser nearest to the model that they received",
                UserWarning,
                stacklevel=5,
            )

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
        algorithm = self._method(tau, self._rate(problem, x, weight, parts))
        iterates: list[Params] = []
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        weighs = "importance" in algorithm.profile_fields()
        data = _client_data(x, y, parts, weighs=weighs)
        self.history_ = []

        def watch(event: RoundEnd) -> None:
            params = _params(algorithm, problem, event.server)
            iterates.append(params)
            used = np.atleast_2d(params["coef"].numpy()).any(axis=0)
            entry = {name: getattr(event.record, name) for name in _RECORDED}
            entry["loss"] = _loss(problem, data, params)
            entry["support"] = np.flatnonzero(used).tolist()
            self.history_.append(entry)
            if self._steady() and _settled(self.history_, 1e-6):
                raise StopTraining("the loss has converged")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # `_say_if_unsettled` knows more
            simulate(
                algorithm,
                problem,
                data,
                self._rounds(_ROUNDS if self.solver_ in PURSUIT else _GRADIENT_ROUNDS),
                seed=seed,
                participation=self.participation,
                evaluate_every=0,
                callbacks=[watch],
            )
        self.n_iter_ = len(self.history_)
        losses = np.array([record["loss"] for record in self.history_])
        best = int(np.where(np.isfinite(losses), losses, np.inf).argmin())
        # every site reports its loss after every round: one number
        sent = sum(record["bytes_up"] for record in self.history_)
        self.bytes_up_ = sent + moments.bytes_up + 8 * len(parts) * self.n_iter_
        self.bytes_up_ += self._agreement_bytes[0]
        received = sum(record["bytes_down"] for record in self.history_)
        self.bytes_down_ = received + moments.bytes_down + self._agreement_bytes[1]
        self._book_dictionary(len(parts))
        coefficients = np.array(iterates[best]["coef"].numpy())
        self._exact = None
        if self.refit:
            coefficients = self._refitted(coefficients, problem, x, y, parts)
        self.loss_ = _loss(problem, data, {"coef": torch.from_numpy(coefficients)})
        self._say_if_unsettled(problem, data, losses)
        return coefficients

    def _refitted(
        self, coefficients: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices]
    ) -> Array:
        """Replace the coefficients on the support by the pooled fit, from sums."""
        ridge = self.l2 or 0.0
        values, sent, received, phase = pooled_refit(coefficients, problem, x, y, parts, ridge)
        self.bytes_up_ += sent
        self.bytes_down_ += received
        if phase == Phase.SEPARATED:
            ridge = ridge or problem.l2  # that of the solver's own iterations
            values, sent, received, _ = pooled_refit(coefficients, problem, x, y, parts, ridge)
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
        """Warn about a fit that is worse than none, or about a loss that has not converged."""
        null = _loss(problem, data, problem.init(Key(0)))
        gradient = self.solver_ not in PURSUIT
        cure = "use a smaller lr" if gradient and self.lr is not None else "use solver='exact'"
        if not self.loss_ <= 2 * null or not losses[-1] <= 2 * max(null, losses[0]):
            warnings.warn(
                f"the run diverged (loss {losses[-1]:.3g} in the last round, {null:.3g} without "
                f"any coefficient): the support is unreliable; {cure}, or a larger l2",
                ConvergenceWarning,
                stacklevel=6,
            )
        elif len(losses) > 2 and self._steady() and not _settled(self.history_, _SETTLED):
            warnings.warn(
                f"the loss has not converged after rounds={len(losses)}; the best round is kept. "
                "Increase rounds, or use solver='exact'",
                ConvergenceWarning,
                stacklevel=6,
            )

    def _steady(self) -> bool:
        """Return whether every round reads all rows of all sites, so that its loss can converge."""
        return bool(self.participation == 1 and self.batch_size is None)

    def _method(self, tau: int, rate: float) -> AnyAlgorithm:
        settings: dict[str, Any] = {"tau": tau, "scope": "row"}
        if self.solver_ in PURSUIT and self._setting("dictionary", None) is None:
            settings["prune"] = "cost"
        if self.solver == self.solver_:  # those of "auto" are of the lossless solver
            settings |= self._options()
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
        """Return the step size: the given one, 1 / L, or the 1 / (6 l) of Fed-HT's theory."""
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


def _settled(history: list[dict[str, Any]], tolerance: float) -> bool:
    """Return whether the losses of the last three rounds agree."""
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
    """Return the mean loss over all rows, a sum over sites."""
    weight = torch.ones(len(data.y), dtype=problem.dtype)
    rows = Batch(as_design(data.x), data.y, weight, torch.tensor(True), torch.tensor(0))
    return float(problem.loss(params, rows))


def _client_data(x: Any, y: torch.Tensor, parts: Sequence[Indices], *, weighs: bool) -> ClientData:
    """Return the sites; `weighs` adds the mean weight of the rows to their profiles."""
    no_rows = Ragged.from_sizes(np.zeros(0, np.int64), np.zeros(len(parts), np.int64))
    design: Any = x if sparse.issparse(x) else torch.from_numpy(np.ascontiguousarray(x))
    means = (float(y[rows, 1].mean()) for rows in parts)
    profiles = tuple({"importance": mean} if weighs else {} for mean in means)
    return ClientData(design, y, Ragged.of(parts), no_rows, no_rows, profiles, name="estimator")


def pooled_refit(
    coefficients: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Refit the non-zero coefficients; return them, the bytes up and down, and how it ended."""
    if coefficients.ndim == 2:
        return _softmax_refit(coefficients, problem, x, y, parts, ridge)
    weights = coefficients[:-1] if problem.intercept else coefficients
    chosen = np.flatnonzero(weights)
    if not len(chosen):
        return coefficients, 0, 0, Phase.CONVERGED
    if problem.quadratic:
        return _least_squares(coefficients, problem, x, y, parts, ridge)
    small = GLM(
        len(chosen),
        problem.datafit.name,
        l2=ridge,
        intercept=problem.intercept,
        keep=range(len(chosen)),
        weighted=True,
    )
    start = coefficients[[*chosen, len(weights)] if problem.intercept else chosen].copy()
    columns = _columns(problem, x, chosen)
    fit = exact_fit(
        FedBestSubset(tau=0), small, Sites.of(columns, y, parts), start, rounds=_REFIT_ROUNDS
    )
    values = np.zeros_like(coefficients)
    values[chosen] = fit.search.coefficients[: len(chosen)]
    if problem.intercept:
        values[-1] = fit.search.coefficients[-1]
    return values, fit.bytes_up, fit.bytes_down, fit.search.phase


def _least_squares(
    coefficients: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Solve the normal equations, which sites send once, bit-identical to a deployment."""
    weights = coefficients[:-1] if problem.intercept else coefficients
    chosen = np.flatnonzero(weights)
    columns, ridges = _columns(problem, x, chosen), np.full(len(chosen), ridge)
    if problem.intercept:
        columns = np.concatenate([columns, np.ones((len(columns), 1))], axis=1)
        chosen, ridges = np.append(chosen, len(weights)), np.append(ridges, 0.0)
    target, weight = y[:, 0].numpy(), y[:, 1].numpy()
    solved, sent = refit(columns, target, weight, parts, ridges)
    values = np.zeros_like(coefficients)
    values[chosen] = solved
    return values, sent, 0, Phase.CONVERGED


def _columns(problem: GLM, x: Any, chosen: Indices) -> Array:
    if problem.dictionary is not None:
        return np.asarray(x @ problem.dictionary.numpy()[:, chosen])
    part: Any = x[:, chosen]
    return np.asarray(part.toarray() if sparse.issparse(x) else part)


def _softmax_refit(
    coefficients: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Take damped Newton steps in all classes at once; each class has its own support."""
    used = coefficients != 0
    if problem.intercept:
        used[:, -1] = True
    inner = used[:, :-1] if problem.intercept else used
    chosen = np.flatnonzero(inner.any(axis=0))
    columns = _columns(problem, x, chosen)
    if problem.intercept:
        columns = np.concatenate([columns, np.ones((len(columns), 1))], axis=1)
        chosen = np.append(chosen, coefficients.shape[1] - 1)
    label, weight = y[:, 0].numpy().astype(np.int64), y[:, 1].numpy()
    sites = [(columns[rows], label[rows], weight[rows]) for rows in parts]
    mask = used[:, chosen]
    total = float(sum(part[2].sum() for part in sites))
    strength = np.broadcast_to(
        np.where(chosen == coefficients.shape[1] - 1, 0.0, ridge), mask.shape
    )
    ridges = total * (strength if problem.intercept else np.full(mask.shape, ridge))[mask]
    b, up, down, phase = coefficients[:, chosen].copy(), 0, 0, Phase.STALLED

    def asked(at: Array) -> tuple[float, Array, Array]:
        nonlocal up, down
        loss, gradient, hessian = (
            float(ridges @ at[mask] ** 2) / 2,
            ridges * at[mask],
            np.diag(ridges),
        )
        for own_x, own_y, own_weight in sites:
            sums = _softmax_sums(own_x, own_y, own_weight, at, mask)
            size = {"sums": torch.from_numpy(np.concatenate([s.ravel() for s in sums[1:]]))}
            up, down = up + 8 + wire.size(size), down + wire.size({"b": torch.from_numpy(at)})
            loss, gradient, hessian = loss + float(sums[0]), gradient + sums[1], hessian + sums[2]
        return loss, gradient, hessian

    loss, gradient, hessian = asked(b)
    null = loss
    for _ in range(_REFIT_ROUNDS):
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-10)[0]
        fall = float(gradient @ step)
        if loss < 1e-6 * null or np.abs(b).max() > _FAR:
            phase = Phase.SEPARATED
            break
        if fall < 1e-13 * (1 + abs(loss)):
            b[mask] -= step
            phase = Phase.CONVERGED
            break
        length, trial = 1.0, b.copy()
        while length > 1e-5:
            trial[mask] = b[mask] - length * step
            after = asked(trial)
            if after[0] <= loss - 1e-4 * length * fall + 1e-13 * abs(loss):
                break
            length /= 2
        else:
            break
        b, (loss, gradient, hessian) = trial.copy(), after
    values = np.zeros_like(coefficients)
    values[:, chosen] = b
    return values, up, down, phase


def _softmax_sums(
    x: Array, label: Indices, weight: Array, b: Array, mask: Any
) -> tuple[Array, Array, Array]:
    """Return a site's loss, gradient and Hessian in the coefficients selected by the mask."""
    u = x @ b.T
    u = u - u.max(axis=1, keepdims=True)
    share = np.exp(u)
    norm = share.sum(axis=1, keepdims=True)
    share = share / norm
    loss = float(weight @ (np.log(norm[:, 0]) - u[np.arange(len(u)), label]))
    residual = share.copy()
    residual[np.arange(len(u)), label] -= 1
    gradient = ((residual * weight[:, None]).T @ x)[mask]
    wide = [np.einsum("n,nk->nk", share[:, c], x)[:, mask[c]] for c in range(len(b))]
    scaled = np.concatenate(wide, axis=1)
    hessian = -scaled.T @ (scaled * weight[:, None])
    start = 0
    for c, part in enumerate(wide):
        inside, width = slice(start, start + part.shape[1]), part.shape[1]
        hessian[inside, inside] += (part * weight[:, None]).T @ x[:, mask[c]]
        start += width
    return np.array(loss), gradient, hessian
