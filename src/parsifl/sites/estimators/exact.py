"""The lossless solver in one process: rounds of `FedBestSubset`, and results of its sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from parsifl import wire
from parsifl.core.algorithm import ClientInfo, ClientUpload
from parsifl.core.batching import ClientRoundData, Rows
from parsifl.core.keys import Key
from parsifl.core.problem import CurvatureSums, Summable
from parsifl.linear.design import as_design
from parsifl.sites.estimators.moments import Array, Indices
from parsifl.sites.estimators.site_fits import SiteFits
from parsifl.sites.search.best_subset import quadratic_model
from parsifl.sites.search.certificate import Certificate, prove, undecided
from parsifl.sites.search.fedbestsubset import (
    BestSubsetQuestion,
    FedBestSubset,
    as_search,
    as_sums,
)
from parsifl.sites.search.subset_state import ALWAYS, Phase, Rules, Search, Sums

_NODE_WORK = 2e8
_SHORT_PATH, _STEPS = 10, 12


@dataclass(frozen=True, eq=False)
class SubsetPath:
    """The best subsets of several sizes.

    Attributes
    ----------
    numbers
        Maximum number of units of each.
    coefficients
        [numbers, width], in standardised units.
    losses
        The loss of each, summed over rows, including the l2 term.
    empty
        The loss of the model without any of these coefficients.
    """

    numbers: Indices
    coefficients: Array
    losses: Array
    empty: float


@dataclass(frozen=True, eq=False)
class Sites:
    """The rows of every site, as `client_update` reads them."""

    rows: tuple[Rows, ...]
    infos: tuple[ClientInfo, ...]

    @classmethod
    def of(cls, x: Any, targets: torch.Tensor, parts: list[Indices]) -> Sites:
        """Cut rows into sites; a single site is not copied."""
        dense = isinstance(x, np.ndarray)
        pool: Any = torch.from_numpy(np.ascontiguousarray(x)) if dense else as_design(x)
        cut = []
        for part in parts:
            index = torch.from_numpy(np.ascontiguousarray(part))
            single = len(parts) == 1 and len(part) == len(targets)
            site_rows, y = (pool, targets) if single else (pool[index], targets[index])
            cut.append(Rows(site_rows, y, torch.ones(len(part), dtype=torch.float64)))
        infos = tuple(ClientInfo(i, len(part)) for i, part in enumerate(parts))
        return cls(tuple(cut), infos)


@dataclass(frozen=True, eq=False)
class ExactFit:
    """The outcome of the rounds.

    Attributes
    ----------
    search, rules
        The last state of the search, and its rules.
    columns
        The coefficients of the model, in ascending order; an intercept of the problem is the last.
    rows, losses, gradients, information
        The answer of every site at the solution, on these columns: [sites], [sites],
        [sites, c] and [sites, c, c].
    history, bytes_up, bytes_down
        The rounds, including the last one (for the answers above).
    own_intercepts, centred
        Whether sites have their own intercepts, and which means were subtracted beforehand.
    constant
        The constant of the negative log-likelihood that the loss omits.
    proof
        A certificate that took additional rounds.
    nodes
        How many nodes branch and bound may visit; None: as many as take about a second.
    by_site
        The fits of the sites and sums for robust errors; None if sites did not send them.
    weight_type, weight_scale, log_weights
        What weights mean ("" without weights), their mean before they were scaled to 1, and for
        precision weights of a squared loss the sum of the logarithms of those that were used.
    """

    search: Search
    rules: Rules
    columns: Indices
    rows: Array
    losses: Array
    gradients: Array
    information: Array
    history: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    own_intercepts: bool
    centred: Literal["", "global", "client"] = ""
    constant: float = 0.0
    proof: Certificate | None = None
    nodes: int | None = None
    by_site: SiteFits | None = None
    weight_type: str = ""
    weight_scale: float = 1.0
    log_weights: float = 0.0

    @property
    def one_shot(self) -> bool:
        """Whether the sites sent the whole Hessian of a squared loss, which determines any fit."""
        return self.rules.quadratic and len(self.search.known) == self.rules.width

    def polished(self) -> ExactFit:
        """Return the fit after one Newton step on its support.

        A search from gradients ends near the minimum. Losses and gradients of the sites follow
        their quadratic models.
        """
        b = self.search.coefficients.copy()
        ridge = self.rules.ridge[self.columns] * self.rows.sum()
        gradient = self.gradients.sum(0) + ridge * b[self.columns]
        hessian = self.information.sum(0) + np.diag(ridge)
        step = -np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
        b[self.columns] += step
        curved = self.information @ step
        loss = self.search.loss + float(gradient @ step + step @ hessian @ step / 2)
        return replace(
            self,
            search=replace(self.search, coefficients=b, loss=loss),
            losses=self.losses + self.gradients @ step + curved @ step / 2,
            gradients=self.gradients + curved,
        )

    def path_numbers(self) -> Indices:
        """Return the numbers of terms of a path, including that of this fit."""
        units = int(self.rules.labels.max(initial=-1)) + 1
        most = min(units, max(2 * self.rules.count, _SHORT_PATH))
        numbers = {round(most ** (i / (_STEPS - 1))) for i in range(_STEPS)} if most else set()
        if most <= _STEPS:
            numbers = set(range(1, most + 1))
        return np.array(sorted(numbers | {self.rules.count} - {0}), np.int64)

    def path(self) -> SubsetPath:
        """Return the best subsets of growing size; only for `one_shot`, and without a message."""
        model, names = quadratic_model(self.search, self.rules)
        selected = self.search.support & (self.rules.labels >= 0)
        chosen = np.unique(self.rules.labels[selected])
        here = tuple(np.searchsorted(names, chosen).tolist())
        empty = self.search.loss - model.fit(here).value
        numbers = self.path_numbers()
        coefficients, losses = np.zeros((len(numbers), self.rules.width)), np.empty(len(numbers))
        for i, number in enumerate(numbers):
            fit = model.fit(here if number == len(here) else model.search(number, thorough=True))
            coefficients[i, fit.columns], losses[i] = fit.coefficients, empty + fit.value
        return SubsetPath(numbers, coefficients, losses, empty)

    @cached_property
    def certificate(self) -> Certificate:
        """The certificate: what is known about other supports of this size."""
        search, rules = self.search, self.rules
        if self.proof is not None:
            return self.proof
        if not self.one_shot:
            reason = (
                "the sites sent products of the candidates only"
                if rules.quadratic
                else "a loss that is not quadratic needs additional rounds: set certificate_rounds"
            )
            return Certificate(False, float("nan"), 0, reason)
        model, names = quadratic_model(search, rules)
        chosen = np.unique(rules.labels[search.support & (rules.labels >= 0)])
        here = tuple(np.searchsorted(names, chosen).tolist())
        nodes = int(np.clip(_NODE_WORK / max(len(names), 1) ** 3, 1, 20_000))
        nodes = nodes if self.nodes is None else self.nodes
        value = model.fit(here).value
        lowest, _, visited = model.bound(here, len(here), nodes)
        certificate = Certificate.of(search.loss, search.loss + lowest - value, visited)
        if certificate.proven and (reason := undecided(model, here, nodes)):
            return Certificate(False, float("nan"), visited, reason)
        return certificate


def certified(
    fit: ExactFit, algorithm: FedBestSubset, problem: Summable, sites: Sites, rounds: int
) -> ExactFit:
    """Return the fit with a certificate from at most `rounds` additional rounds."""
    rules, search, sent = fit.rules, fit.search, [fit.bytes_up, fit.bytes_down]

    def ask(points: Sequence[tuple[Array, Indices]]) -> list[Sums]:
        answers = []
        for at, columns in points:
            model = {problem.name: torch.from_numpy(at)}
            question = BestSubsetQuestion(model, model, torch.from_numpy(columns))
            uploads, record = _asked(algorithm, problem, sites, question, len(fit.history) + 1)
            sent[0] += record["bytes_up"]
            sent[1] += record["bytes_down"]
            total = algorithm.accumulator(problem)
            for info, upload in zip(sites.infos, uploads, strict=True):
                total.add(ClientUpload(info, float(info.samples), upload, question))
            answers.append(as_sums(total.total()))
        return answers

    if search.phase != Phase.CONVERGED:
        proof = Certificate(False, float("nan"), 0, "the fit did not converge")
    else:
        one = algorithm.upload_bytes(rules.width, rules.width, quadratic=rules.quadratic)
        poisson = getattr(getattr(problem, "datafit", None), "name", "") == "poisson"
        proof = prove(
            ask,
            rules,
            search.coefficients,
            search.loss,
            rounds=rounds,
            batch=max(algorithm.max_bytes // one, 1),
            floor=-np.inf if poisson else 0.0,
        )
    return replace(fit, proof=proof, bytes_up=sent[0], bytes_down=sent[1])


def exact_fit(
    algorithm: FedBestSubset, problem: Summable, sites: Sites, start: Array, *, rounds: int
) -> ExactFit:
    """Run the algorithm until it ends, at most `rounds` rounds, and request the last sums."""
    algorithm.check_capabilities(problem)
    first = torch.from_numpy(start)
    server, key = algorithm.started(problem, first), Key(0)
    history: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        total = algorithm.accumulator(problem)
        question = algorithm.broadcast(problem, server, sites.infos[0], key)
        uploads, record = _asked(algorithm, problem, sites, question, number)
        for info, upload in zip(sites.infos, uploads, strict=True):
            total.add(ClientUpload(info, float(info.samples), upload, question))
        server = algorithm.aggregate(problem, server, total.total(), key)
        record["loss"] = float(server.loss) / float(server.rows)
        record["support"] = _slopes(problem, server.support)
        history.append(record)
        if int(server.phase) >= Phase.CONVERGED:
            break
    search, rules = as_search(server), algorithm.rules(problem, first)
    columns = np.flatnonzero(search.support | (rules.labels == ALWAYS))
    model = {problem.name: server.coefficients}
    question = BestSubsetQuestion(model, model, torch.from_numpy(columns))
    uploads, record = _asked(algorithm, problem, sites, question, len(history) + 1)
    if not (rules.quadratic and len(search.known) == rules.width):  # else all of it was sent before
        last = {"loss": history[-1]["loss"], "support": history[-1]["support"]}
        history.append({**record, **last})
    fit = ExactFit(
        search=search,
        rules=rules,
        columns=columns,
        rows=np.array([float(upload.rows) for upload in uploads]),
        losses=np.array([float(upload.loss) for upload in uploads]),
        gradients=np.stack([upload.gradient.numpy()[columns] for upload in uploads]),
        information=np.stack(
            [algorithm.hessian(upload.curvature, question.candidates).numpy() for upload in uploads]
        ),
        history=history,
        bytes_up=sum(record["bytes_up"] for record in history),
        bytes_down=sum(record["bytes_down"] for record in history),
        own_intercepts=algorithm.intercepts == "own",
    )
    return fit.polished() if algorithm.gradients else fit


def _asked(
    algorithm: FedBestSubset,
    problem: Summable,
    sites: Sites,
    question: BestSubsetQuestion,
    number: int,
) -> tuple[list[CurvatureSums], dict[str, Any]]:
    """Return the answer of every site, and the record of the round."""
    no_key = torch.tensor(0)
    uploads = [
        algorithm.client_update(
            problem, question, None, ClientRoundData({}, rows, no_key, number)
        ).upload
        for rows in sites.rows
    ]
    record = {
        "round": number,
        "trained": len(uploads),
        "bytes_up": sum(wire.size(upload) for upload in uploads),
        "bytes_down": len(uploads) * wire.size(question),
    }
    return uploads, record


def _slopes(problem: Summable, support: torch.Tensor) -> list[int]:
    positions: list[int] = support.nonzero()[:, 0].tolist()
    return [
        position for position in positions if not problem.intercept or position < len(support) - 1
    ]
