"""The most common server: a weighted mean of the clients' parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, C, ClientInfo, P
from parsifl.core.batching import ClientRoundData
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params


@dataclass(frozen=True)
class Mean:
    """A weighted sum with its weight, leaf by leaf: clients may lack leaves (absent layers).

    `total` is a tree of parameters; in the summand of one client it may still be `Scaled`.
    """

    total: Any
    weight: Params

    @classmethod
    def of(cls, params: Params, weight: float) -> Mean:
        """Return one client's summand."""
        # leaves of one dtype share a weight tensor, because the sum allocates its own memory
        weights = {value.dtype: value for value in params.values()}
        shared = {dtype: value.new_full((), weight) for dtype, value in weights.items()}
        return cls(
            tree.Scaled(weight, params),
            {name: shared[value.dtype] for name, value in params.items()},
        )

    def value(self) -> Params:
        """Return the mean over the clients that sent the leaf."""
        alone = isinstance(self.total, tree.Scaled)
        totals: Params = tree.accumulate(None, self.total) if alone else self.total
        return {name: total / self.weight[name] for name, total in totals.items()}


@dataclass(frozen=True)
class Weighted:
    """Settings of the weights of clients.

    Parameters
    ----------
    weighting
        "samples" weights a client by its number of training rows, "uniform" weights all equally.
    """

    weighting: Literal["samples", "uniform"] = "samples"

    def weight(self, client: ClientInfo) -> float:
        """Return the number of training rows, or 1."""
        return float(client.samples) if self.weighting == "samples" else 1.0


@dataclass(frozen=True)
class Averaging(Weighted, AdditiveAlgorithm[P, Params, C, Params, Params, Mean], Generic[P, C]):
    """Abstract base: the server sends its parameters and averages the uploaded ones.

    A subclass implements `client_update`; all other methods default to those of FedAvg.
    A leaf that no client sent keeps the server's value.
    """

    def init_server(self, problem: P, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the problem's initial parameters."""
        return problem.init(key)

    def broadcast(self, problem: P, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the model."""
        return server

    def model(self, problem: P, server: Params) -> Model:
        """Return the global model."""
        return Model(problem, server)

    def contribute(self, problem: P, upload: Params, weight: float) -> Mean:
        """Weight the uploaded parameters."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: P, server: Params, total: Mean, key: Key) -> Params:
        """Replace every uploaded leaf by its mean."""
        return {**server, **total.value()}

    def personalize(self, problem: P, received: Params, state: C, data: ClientRoundData) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received)
