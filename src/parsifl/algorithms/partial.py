"""Methods that share some layers and keep the others on the client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from parsifl.algorithm import Algorithm, ClientInfo, Local
from parsifl.algorithms.mean import Mean
from parsifl.algorithms.settings import LocalSGD
from parsifl.errors import CapabilityError
from parsifl.keys import Key
from parsifl.problem import Layered, Model, Params
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@dataclass(frozen=True)
class PartialMean(Algorithm[Layered, Params, Params, Params, Params, Mean]):
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

    def weight(self, info: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(info.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Layered, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the problem's initial parameters of the shared layers."""
        shared, own = self.split(problem, problem.init(key))
        if not shared or not own:
            raise CapabilityError(
                f"{type(self).__name__} needs a model with a body and a head, but its head is "
                f"{', '.join(problem.head)} and nothing is left beside it; add a hidden layer"
            )
        return shared

    def broadcast(self, problem: Layered, server: Params, info: ClientInfo, key: Key) -> Params:
        """Send the shared layers."""
        return server

    def init_client(self, problem: Layered, info: ClientInfo, down: Params, key: Key) -> Params:
        """Start from the problem's initial parameters of the own layers."""
        return self.split(problem, problem.init(key))[1]

    def personalize(self, problem: Layered, down: Params, client: Params, shard: Shard) -> Model:
        """Judge every client on the shared layers together with its own."""
        return Model(problem, {**down, **client})

    def contribute(self, problem: Layered, upload: Params, weight: float) -> Mean:
        """Weigh the uploaded layers."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Layered, server: Params, total: Mean, key: Key) -> Params:
        """Replace the shared layers by their mean."""
        return {**server, **total.value()}


@dataclass(frozen=True)
class JointMean(LocalSGD, PartialMean):
    """Abstract base: shared and own layers are trained together."""

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Layered, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Train all layers, send the shared ones and keep the others."""
        rate = self.rate(shard.round)
        start = {**down, **client}
        trained = sgd(
            problem, start, shard["train"], rate, momentum=self.momentum, decay=self.decay
        )
        shared, own = self.split(problem, trained)
        return Local(own, shared)
