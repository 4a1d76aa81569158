"""Algorithms that share some layers and keep the others on the client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.core.problem import Layered, Model, Params
from parsifl.solvers.sgd import sgd


@dataclass(frozen=True)
class LayerSharing(
    LocalSgd, Weighted, AdditiveAlgorithm[Layered, Params, Params, Params, Params, Mean]
):
    """Abstract base: shared layers are averaged, personal layers never leave the client.

    There is no global model: the server has no values for the personal layers.
    """

    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)

    @abstractmethod
    def shares(self, problem: Layered, name: str) -> bool:
        """Return whether a parameter is shared."""

    def split(self, problem: Layered, params: Params) -> tuple[Params, Params]:
        """Return the shared and the personal parameters."""
        shared = {name: value for name, value in params.items() if self.shares(problem, name)}
        personal = {name: value for name, value in params.items() if name not in shared}
        return shared, personal

    def init_server(self, problem: Layered, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the initial parameters of the shared layers."""
        shared, personal = self.split(problem, problem.init(key))
        if not shared or not personal:
            raise CapabilityError(
                f"{type(self).__name__} needs a model with a body and a head, but the head "
                f"({', '.join(problem.head)}) is the whole model; add a hidden layer"
            )
        return shared

    def broadcast(self, problem: Layered, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the shared layers."""
        return server

    def init_client(
        self, problem: Layered, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Return the initial parameters of the personal layers."""
        return self.split(problem, problem.init(key))[1]

    def client_update(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train all layers together, send the shared ones and keep the others."""
        start = {**received, **state}
        trained = sgd(problem, start, data["train"], self.sgd(data.round))
        shared, personal = self.split(problem, trained)
        return ClientUpdate(personal, shared)

    def personalize(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the shared layers combined with its own."""
        return Model(problem, {**received, **state})

    def contribute(self, problem: Layered, upload: Params, weight: float) -> Mean:
        """Weight the uploaded layers."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Layered, server: Params, total: Mean, key: Key) -> Params:
        """Replace the shared layers by their mean."""
        return {**server, **total.value()}
