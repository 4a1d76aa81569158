"""FedDyn: local problems with a dynamic regularizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.dynamic_regularization import (
    acknowledged,
    server_step,
    solve,
)
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate, participants
from parsifl.core.batching import ClientRoundData
from parsifl.core.config import Positive
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem


@dataclass(frozen=True)
class DynServer:
    """The global model w, the mean h of the clients' duals, and the number of clients N."""

    params: Params
    dual: Params
    clients: int


@final
@dataclass(frozen=True)
class FedDyn(LocalSgd, AdditiveAlgorithm[Problem, DynServer, Params, Params, Params, Mean]):
    r"""A linear and a proximal term align the minimizers of the clients with the global one.

    .. math:: w_i \approx \arg\min_w f_i(w) - \langle h_i, w\rangle
              + \tfrac{\alpha}{2} \|w - w_t\|^2, \quad
              h_i \leftarrow h_i - \alpha (w_i - w_t), \quad
              h \leftarrow h - \tfrac{\alpha}{N} \textstyle\sum_{i \in S} (w_i - w_t), \quad
              w_{t+1} = \overline{w_i} - \tfrac{1}{\alpha} h

    with alpha = `alpha`, solved by SGD with eta = `lr`. Sent: the model down, its change
    w_i - w_t up. Kept: h_i on the client; the server keeps only the mean h.

    Parameters
    ----------
    alpha
        Strength of the proximal term. 1 / alpha is the step of the server.
    """

    cites: ClassVar[str] = (
        "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    )

    alpha: Positive = 0.1

    def weight(self, client: ClientInfo) -> float:
        """Count every client once, as in the paper."""
        return 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> DynServer:
        """Return the initial parameters and a zero dual."""
        params = problem.init(key)
        return DynServer(params, tree.zeros_like(params), participants(clients))

    def broadcast(
        self, problem: Problem, server: DynServer, client: ClientInfo, key: Key
    ) -> Params:
        """Send the model."""
        return server.params

    def model(self, problem: Problem, server: DynServer) -> Model:
        """Return the global model."""
        return Model(problem, server.params)

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Return a zero dual."""
        return tree.zeros_like(received)

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Solve the regularized problem and update the dual."""
        batches, config = data["train"], self.sgd(data.round)
        change, dual = solve(problem, received, state, batches, config, self.alpha)
        return ClientUpdate(dual, change)

    def acknowledge(
        self, problem: Problem, state: Params, upload: Params, arrived: Params
    ) -> Params:
        """Move the dual by the change that the server received."""
        return acknowledged(state, upload, arrived, self.alpha)

    def personalize(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received)

    def contribute(self, problem: Problem, upload: Params, weight: float) -> Mean:
        """Sum the changes."""
        return Mean.of(upload, weight)

    def aggregate(self, problem: Problem, server: DynServer, total: Mean, key: Key) -> DynServer:
        """Correct the mean of the clients' models by the mean dual."""
        params, dual = server_step(server.params, server.dual, total, server.clients, self.alpha)
        return DynServer(params, dual, server.clients)
