"""Algorithms whose server sends each client its own mixture of the clients' models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import (
    ClientInfo,
    ClientUpdate,
    ClientUpload,
    Conformance,
    GatherAlgorithm,
)
from parsifl.core.batching import ClientRoundData
from parsifl.core.config import NonNegative, Positive
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.solvers.update_rules import LinearRule


@dataclass(frozen=True)
class AttentionServer:
    """The last model of every client and the mixture for every client, stacked by client id."""

    models: Params
    clouds: Params


@dataclass(frozen=True)
class Attention(LocalSgd, GatherAlgorithm[Problem, AttentionServer, Params, Params, Params]):
    """Abstract base: u_i = sum_j xi_ij w_j on the server, f_i + (prox / 2) |w - u_i|^2 on clients.

    A client that has not uploaded yet is represented by the initial model.

    Parameters
    ----------
    lr
        Step size of the clients' SGD.
    lam
        lambda, the strength of the pull towards the mixture.
    sigma
        Scale of the attention.
    start
        Where a client starts: at its "own" last model, or at the "cloud" model it receives.
    """

    conformance: ClassVar[Conformance] = Conformance(
        exempt={"personal state stays at home": "the server mixes the clients' own models"}
    )

    lr: Positive = 0.05
    lam: NonNegative = 1.0
    sigma: Positive = 50.0
    start: Literal["own", "cloud"] = "own"

    @abstractmethod
    def attention(self, models: Tensor) -> Tensor:
        """Return xi [N, N], whose rows sum to one, from the clients' models [N, d]."""

    def prox(self) -> float:
        """Return the weight of |w - u_i|^2 / 2 in a client's objective."""
        return self.lam

    def check(self) -> None:
        """Reject a proximal term for which SGD diverges."""
        if self.lr * self.prox() >= 2:
            raise ConfigError(
                f"lr times the weight of the proximal term is {self.lr * self.prox():g} and must "
                "be below 2, or the steps towards the mixture diverge; lower lr or lam"
            )

    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> AttentionServer:
        """Return the initial model for every client."""
        count = len(clients)
        models = tree.map(lambda leaf: torch.stack([leaf] * count), problem.init(key))
        return AttentionServer(models, models)

    def broadcast(
        self, problem: Problem, server: AttentionServer, client: ClientInfo, key: Key
    ) -> Params:
        """Send the client its mixture u_i."""
        return {name: leaf[client.id] for name, leaf in server.clouds.items()}

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Return the initial model, which the server uses for clients that have not trained."""
        return problem.init(key)

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train the personal model with a pull towards the mixture."""
        start, config = state if self.start == "own" else received, self.sgd(data.round)
        rule, anchor = LinearRule(self.prox()), tree.scale(-self.prox(), received)
        trained = sgd(problem, start, data["train"], config, rule=rule, aux=(anchor,))
        return ClientUpdate(trained, trained)

    def personalize(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on its own model."""
        return Model(problem, state)

    def aggregate(
        self,
        problem: Problem,
        server: AttentionServer,
        uploads: Sequence[ClientUpload[Params]],
        key: Key,
    ) -> AttentionServer:
        """Replace the uploaded models, and update the mixture of every client."""
        index = torch.tensor([upload.client.id for upload in uploads])
        models = {
            name: leaf.index_copy(0, index.to(leaf.device), _stacked(uploads, name))
            for name, leaf in server.models.items()
        }
        flat = torch.cat([leaf.flatten(1) for _, leaf in sorted(models.items())], dim=1)
        weights = self.attention(flat)
        clouds = {
            name: (weights @ leaf.flatten(1)).reshape(leaf.shape) for name, leaf in models.items()
        }
        return AttentionServer(models, clouds)


def _stacked(uploads: Sequence[ClientUpload[Params]], name: str) -> Tensor:
    return torch.stack([upload.value[name] for upload in uploads])
