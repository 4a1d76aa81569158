"""Methods that share some layers and keep the others on the client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import CapabilityError
from parsifl.core.keys import Key
from parsifl.core.problem import Layered, Model, Params
from parsifl.solvers.sgd import SgdConfig, sgd


@dataclass(frozen=True)
class PartialMean(AdditiveAlgorithm[Layered, Params, Params, Params, Params, Mean]):
    """Abstract base: the shared layers are averaged, the own layers never leave the client.

    There is no global model: the server has no values for the clients' own layers.
    """

    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)

    weighting: Literal["samples", "uniform"] = "samples"

    @abstractmethod
    def shares(self, problem: Layered, name: str) -> bool:
        """Tell whether a parameter is shared."""

    def split(self, problem: Layered, params: Params) -> tuple[Params, Params]:
        """Return the shared and the own parameters."""
        shared = {name: value for name, value in params.items() if self.shares(problem, name)}
        own = {name: value for name, value in params.items() if name not in shared}
        return shared, own

    def weight(self, client: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(client.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Layered, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the problem's initial parameters of the shared layers."""
        shared, own = self.split(problem, problem.init(key))
        if not shared or not own:
            raise CapabilityError(
                f"{type(self).__name__} needs a model with a body and a head, but its head is "
                f"{', '.join(problem.head)} and nothing is left beside it; add a hidden layer"
            )
        return shared

    def broadcast(self, problem: Layered, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the shared layers."""
        return server

    def init_client(
        self, problem: Layered, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Start from the problem's initial parameters of the own layers."""
        return self.split(problem, problem.init(key))[1]

    def personalize(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Judge every client on the shared layers together with its own."""
        return Model(problem, {**received, **state})

    def contribute(self, problem: Layered, upload: Params, weight: float) -> Mean:
        """Weigh the uploaded layers."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Layered, server: Params, total: Mean, key: Key) -> Params:
        """Replace the shared layers by their mean."""
        return {**server, **total.value()}


@dataclass(frozen=True)
class JointMean(LocalSgd, PartialMean):
    """Abstract base: shared and own layers are trained together."""

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train all layers, send the shared ones and keep the others."""
        rate = self.learning_rate(data.round)
        start = {**received, **state}
        trained = sgd(
            problem, start, data["train"], SgdConfig(rate, self.momentum, self.weight_decay)
        )
        shared, own = self.split(problem, trained)
        return ClientUpdate(own, shared)
