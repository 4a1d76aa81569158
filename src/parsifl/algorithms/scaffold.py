"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate, participants
from parsifl.core.batching import ClientRoundData
from parsifl.core.config import Positive
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.solvers.update_rules import LinearRule


@dataclass(frozen=True)
class ScaffoldServer:
    """The global model w, the server's control variate c, and the number of clients N."""

    params: Params
    control: Params
    clients: int


@dataclass(frozen=True)
class ScaffoldMessage:
    """Down: w and c. Up: the changes of w_i and of c_i."""

    params: Params
    control: Params


@dataclass(frozen=True)
class ScaffoldSum:
    """The summed changes, and how many clients they come from."""

    params: Params
    control: Params
    count: Tensor


@final
@dataclass(frozen=True)
class Scaffold(
    LocalSgd,
    AdditiveAlgorithm[
        Problem, ScaffoldServer, Params, ScaffoldMessage, ScaffoldMessage, ScaffoldSum
    ],
):
    r"""Local SGD corrected by control variates (option II of the paper).

    .. math:: w_i \leftarrow w_i - \eta (g_i(w_i) - c_i + c), \quad
              c_i^+ = c_i - c + \frac{w - w_i}{K \eta}, \quad
              w \leftarrow w + \eta_g \overline{\Delta w}, \quad
              c \leftarrow c + \tfrac{|S|}{N} \overline{\Delta c}

    with eta = `lr` and eta_g = `server_lr`. Sent: two models each way. Kept: c_i on the client.

    Parameters
    ----------
    server_lr
        Step size of the server.
    """

    cites: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, "
        "ICML 2020"
    )

    server_lr: Positive = 1.0

    def weight(self, client: ClientInfo) -> float:
        """Count every client once, as in the paper."""
        return 1.0

    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> ScaffoldServer:
        """Return the initial parameters and a zero control."""
        params = problem.init(key)
        return ScaffoldServer(params, tree.zeros_like(params), participants(clients))

    def broadcast(
        self, problem: Problem, server: ScaffoldServer, client: ClientInfo, key: Key
    ) -> ScaffoldMessage:
        """Send the model and the server's control."""
        return ScaffoldMessage(server.params, server.control)

    def model(self, problem: Problem, server: ScaffoldServer) -> Model:
        """Return the global model."""
        return Model(problem, server.params)

    def init_client(
        self, problem: Problem, client: ClientInfo, received: ScaffoldMessage, key: Key
    ) -> Params:
        """Return a zero control."""
        return tree.zeros_like(received.params)

    def client_update(
        self, problem: Problem, received: ScaffoldMessage, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, ScaffoldMessage]:
        """Run corrected SGD and update the control by option II."""
        start, batches, config = received.params, data["train"], self.sgd(data.round)
        correction = tree.subtract(received.control, state)
        trained = sgd(problem, start, batches, config, rule=LinearRule(), aux=(correction,))
        moved = tree.subtract(trained, start)
        # two divisions: steps * lr would be a float32 tensor for any dtype of the model
        steps = batches.active.sum().clamp(min=1)
        control = tree.map(lambda c, dw: -c - dw / steps / config.lr, correction, moved)
        control = tree.where(batches.active.any(), control, state)
        return ClientUpdate(control, ScaffoldMessage(moved, tree.subtract(control, state)))

    def acknowledge(
        self, problem: Problem, state: Params, upload: ScaffoldMessage, arrived: ScaffoldMessage
    ) -> Params:
        """Move the control by the change that the server received."""
        return tree.add(state, tree.subtract(arrived.control, upload.control))

    def personalize(
        self, problem: Problem, received: ScaffoldMessage, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received.params)

    def contribute(self, problem: Problem, upload: ScaffoldMessage, weight: float) -> ScaffoldSum:
        """Sum the changes."""
        return ScaffoldSum(upload.params, upload.control, torch.tensor(weight))

    def aggregate(
        self, problem: Problem, server: ScaffoldServer, total: ScaffoldSum, key: Key
    ) -> ScaffoldServer:
        """Move the model by the mean change and the control by the sum over N."""
        count = float(total.count)
        return ScaffoldServer(
            tree.axpy(self.server_lr / count, total.params, server.params),
            tree.axpy(1 / server.clients, total.control, server.control),
            server.clients,
        )
