"""What FedMac and pFedMe have in common: a personal model coupled to a local global model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import Count, Fraction, NonNegative, Positive
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.coupled import Coupled, alternate, density, sparsify


@dataclass(frozen=True)
class Envelope(LocalSgd, Averaging[Problem, None]):
    """Abstract base: the clients' local global models are averaged, theta is never sent.

    No client keeps state: theta_i starts at the received model in each round. So it makes no
    difference to any model whether everyone trains or only the cohort, and a client's personal
    model is the theta_i that its own rows make of the model that it is sent.

    Parameters
    ----------
    outer_lr, lam
        eta, the step size of the local global model, and lambda, the strength of the coupling.
    gamma, gamma_w, rho
        Weights of the l1 norm of theta_i and of w_i, and the width of its smoothing.
    l1
        "smooth" is rho log cosh(x / rho), which leaves no exact zeros; "proximal" soft-thresholds
        after each step, which does.
    inner, accuracy
        Most steps on one mini-batch, and nu: a subproblem is solved once its squared gradient
        norm is at most this.
    beta
        Weight of the new mean in the server's model.
    threshold, floor
        Entries smaller than `threshold` travel as zeros, but the largest `floor` part of a model
        is always kept; 0 switches this off.
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
        """Refuse an unstable anchor, and momentum where a subproblem is solved."""
        product = self.outer_lr * self.lam
        if product >= 2:
            raise ConfigError(
                f"outer_lr * lam = {product:g} must be below 2: the local global model moves by "
                "this part of its distance to theta in each step and would diverge; lower outer_lr"
            )
        if self.momentum and (self.inner > 1 or self.accuracy):
            raise ConfigError(
                f"momentum = {self.momentum:g} needs inner = 1 and accuracy = 0: several steps on "
                "one mini-batch are plain gradient steps"
            )

    def everyone_trains(self) -> bool:
        """Follow the setting."""
        return self.trains == "everyone"

    @abstractmethod
    def rule(self) -> Coupled:
        """Return the coupling of theta and the local global model."""

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the problem's initial parameters; every client needs rows to train on."""
        for info in clients:
            if info.samples < 2:
                raise DataError(
                    f"client {info.id} has {info.samples} training rows; a personal model needs "
                    "at least 2: leave this client out or give it more rows"
                )
        return problem.init(key)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of the coupled steps."""
        return DataRequest({"train": self.batch_spec(client)})

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Read as much to make the personal model as in a round of training."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train theta_i with its local global model, and send the latter."""
        _, anchor = self._trained(problem, received, data)
        upload = sparsify(anchor, self.threshold, self.floor)
        return ClientUpdate(None, upload, self._notes(upload))

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Judge every client on the theta_i that it makes of the received model."""
        theta, _ = self._trained(problem, received, data)
        return Model(problem, sparsify(theta, self.threshold, self.floor))

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Move by beta to the mean, then drop what is too small to travel."""
        moved = tree.map(lambda w, mean: (1 - self.beta) * w + self.beta * mean, server,
                         total.value())  # fmt: skip
        return sparsify(moved, self.threshold, self.floor)

    def _trained(
        self, problem: Problem, down: Params, shard: ClientRoundData
    ) -> tuple[Params, Params]:
        return alternate(
            problem,
            down,
            shard["train"],
            self.rule(),
            self.learning_rate(shard.round),
            inner=self.inner,
            accuracy=self.accuracy,
            momentum=self.momentum,
            decay=self.weight_decay,
        )

    def over_bound(self) -> float:
        """Return by what factor a setting exceeds what its theorem covers; 0 if not known."""
        return 0.0

    def _notes(self, upload: Params) -> dict[str, Tensor]:
        """Return what the record should say: how sparse the upload is, and a step too large."""
        notes = {}
        if self.threshold or self.l1 == "proximal":
            notes["density"] = density(upload)
        if self.over_bound() > 1:
            like = next(iter(upload.values()))
            factor = torch.full((), self.over_bound(), dtype=like.dtype, device=like.device)
            notes["outer_lr_over_theorem_1"] = factor
        return notes
