"""Algorithms that couple a personal model theta_i to a local copy w_i of the global model."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import Count, Fraction, NonNegative, Positive
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.linear.sparsity.constraint import kept_places
from parsifl.solvers.coupled import Coupled, alternate, density, sparsify

_LEAST_RHO = 1e-30
"""Smallest width of the smoothing: in float32 the inverse of a smaller one may be infinite."""


@dataclass(frozen=True)
class MoreauEnvelope(
    LocalSgd, Weighted, AdditiveAlgorithm[Problem, Params, None, Params, Params, Mean]
):
    """Abstract base: the clients' local global models are averaged; theta is never sent.

    Clients keep no state: theta_i starts at the received model in each round. Training all clients
    instead of the cohort therefore does not change any model. The personal model of a client is the
    theta_i that it trains from the model it receives.

    Parameters
    ----------
    lr
        eta_p, the step size of the personal model.
    outer_lr
        eta, the step size of the local global model w_i.
    lam
        lambda, the strength of the coupling. FedMac needs a lam below the strong convexity of the
        losses (Proposition 1); otherwise its global model may grow without bound.
    gamma
        Weight of the l1 norm of theta_i.
    gamma_w
        Weight of the l1 norm of w_i.
    rho
        Width of the smoothing of the l1 norm.
    l1
        "smooth" is rho log cosh(x / rho), which leaves no exact zeros; "proximal" soft-thresholds
        after each step, which does.
    inner
        Maximum number of steps on one mini-batch.
    accuracy
        nu: a subproblem is solved once its squared gradient norm is at most this.
    beta
        Weight of the new mean in the server's model.
    threshold
        Entries smaller than this are sent as zeros; 0 sends all entries.
    floor
        The fraction of a model's entries, the largest ones, that is always sent.
    trains
        "everyone" is the papers' loop; "cohort" gives the same models for less work.
    """

    weighting: Literal["samples", "uniform"] = "uniform"
    lr: Positive = 0.05
    outer_lr: Positive = 0.02
    lam: NonNegative = 15.0
    gamma: NonNegative = 0.0
    gamma_w: NonNegative = 0.0
    rho: Positive = 1e-2
    l1: Literal["smooth", "proximal"] = "smooth"
    inner: Count = 1
    accuracy: NonNegative = 0.0
    beta: Positive = 1.0
    threshold: NonNegative = 0.0
    floor: Fraction = 0.5
    trains: Literal["cohort", "everyone"] = "cohort"

    def check(self) -> None:
        """Reject an unstable anchor, and momentum where a subproblem is solved."""
        product = self.outer_lr * self.lam
        if product >= 2:
            raise ConfigError(
                f"outer_lr * lam = {product:g} must be below 2, or the local model diverges; "
                "lower outer_lr"
            )
        if self.rho < _LEAST_RHO:
            raise ConfigError(
                f"rho = {self.rho:g} must be at least {_LEAST_RHO:g}: 1 / rho overflows; use a "
                "larger rho, or l1='proximal' for the l1 norm itself"
            )
        if self.momentum and (self.inner > 1 or self.accuracy):
            raise ConfigError(
                f"momentum = {self.momentum:g} needs inner = 1 and accuracy = 0: several steps on "
                "one mini-batch are plain gradient steps"
            )

    def everyone_trains(self) -> bool:
        """Return whether `trains` is "everyone"."""
        return self.trains == "everyone"

    @abstractmethod
    def rule(self) -> Coupled:
        """Return the coupling of theta and the local global model."""

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the initial parameters; warn if the smoothed norm would oscillate."""
        if self.l1 == "smooth":
            self._warn_of_oscillation()
        return problem.init(key)

    def _warn_of_oscillation(self) -> None:
        """Warn if a step is longer than twice the inverse curvature at zero."""
        decay, steps = self.rule().decay, []
        if self.gamma_w:
            product = self.outer_lr * (self.lam + self.gamma_w / self.rho)
            steps.append(("outer_lr * (lam + gamma_w / rho)", product, "outer_lr or gamma_w"))
        if self.gamma:
            term = "lr * (lam + gamma / rho)" if decay else "lr * gamma / rho"
            steps.append((term, self.lr * (decay + self.gamma / self.rho), "lr or gamma"))
        for term, product, remedy in steps:
            if product >= 2:
                warnings.warn(
                    f"{term} = {product:g} should be below 2: entries near zero oscillate and "
                    f"never become small; lower {remedy}, increase rho, or use l1='proximal'",
                    stacklevel=3,
                )

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the global model."""
        return Model(problem, server)

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Request as many mini-batches as a round of training."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train theta_i with its local global model, and send the latter."""
        _, anchor = self._trained(problem, received, data)
        upload = self._pruned(problem, anchor)
        return ClientUpdate(None, upload, self._notes(upload))

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the theta_i that it trains from the received model."""
        theta, _ = self._trained(problem, received, data)
        return Model(problem, self._pruned(problem, theta))

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Weight the local global model."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Move by beta towards the mean, then drop small entries."""
        mean, beta = total.value(), self.beta
        moved = tree.map(lambda w, new: (1 - beta) * w + beta * new, server, mean)
        return self._pruned(problem, moved)

    def _pruned(self, problem: Problem, params: Params) -> Params:
        return sparsify(params, self.threshold, self.floor, kept_places(problem))

    def _trained(
        self, problem: Problem, received: Params, data: ClientRoundData
    ) -> tuple[Params, Params]:
        return alternate(
            problem,
            received,
            data["train"],
            self.sgd(data.round),
            rule=replace(self.rule(), unpenalized=kept_places(problem)),
            inner=self.inner,
            accuracy=self.accuracy,
        )

    def over_bound(self) -> float:
        """Return the factor by which `outer_lr` exceeds its theoretical bound; 0 if unknown."""
        return 0.0

    def _notes(self, upload: Params) -> dict[str, Tensor]:
        """Return metrics: the density of uploads that may have zeros, a step beyond its bound."""
        notes = {}
        if self.threshold or self.l1 == "proximal":
            notes["density"] = density(upload)
        if self.over_bound() > 1:
            like = next(iter(upload.values()))
            factor = torch.full((), self.over_bound(), dtype=like.dtype, device=like.device)
            notes["outer_lr_over_theorem_1"] = factor
        return notes
