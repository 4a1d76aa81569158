"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl import tree
from parsifl.algorithm import Algorithm, ClientInfo, Local
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import Positive
from parsifl.keys import Key
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.rules import Affine
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


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
    LocalSGD,
    Algorithm[Problem, ScaffoldServer, Params, ScaffoldMessage, ScaffoldMessage, ScaffoldSum],
):
    r"""Local SGD corrected by control variates (option II of the paper).

    .. math:: w_i \leftarrow w_i - \eta (g_i(w_i) - c_i + c), \quad
              c_i^+ = c_i - c + \frac{w - w_i}{K \eta}, \quad
              w \leftarrow w + \eta_g \overline{\Delta w}, \quad
              c \leftarrow c + \tfrac{|S|}{N} \overline{\Delta c}

    with eta = `lr` and eta_g = `server_lr`. Sent: two models each way. Kept: c_i on the client.
    """

    cites: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, "
        "ICML 2020"
    )

    server_lr: Positive = 1.0

    def weight(self, info: ClientInfo) -> float:
        """Count every client once, as in the paper."""
        return 1.0

    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> ScaffoldServer:
        """Start with zero controls."""
        params = problem.init(key)
        return ScaffoldServer(params, tree.zeros_like(params), len(clients))

    def broadcast(
        self, problem: Problem, server: ScaffoldServer, info: ClientInfo, key: Key
    ) -> ScaffoldMessage:
        """Send the model and the server's control."""
        return ScaffoldMessage(server.params, server.control)

    def model(self, problem: Problem, server: ScaffoldServer) -> Model:
        """Return the global model."""
        return Model(problem, server.params)

    def init_client(
        self, problem: Problem, info: ClientInfo, down: ScaffoldMessage, key: Key
    ) -> Params:
        """Start with a zero control."""
        return tree.zeros_like(down.params)

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: ScaffoldMessage, client: Params, shard: Shard
    ) -> Local[Params, ScaffoldMessage]:
        """Run corrected SGD and move the control by option II."""
        rate, batches = self.rate(shard.round), shard["train"]
        correction = tree.subtract(down.control, client)
        trained = sgd(
            problem,
            down.params,
            batches,
            rate,
            rule=Affine(),
            aux=(correction,),
            momentum=self.momentum,
            decay=self.decay,
        )
        moved = tree.subtract(trained, down.params)
        # two divisions: steps * rate would be a float32 tensor, whatever the dtype of the model
        steps = batches.active.sum().clamp(min=1)
        control = tree.map(lambda c, dw: -c - dw / steps / rate, correction, moved)
        control = tree.where(batches.active.any(), control, client)
        return Local(control, ScaffoldMessage(moved, tree.subtract(control, client)))

    def personalize(
        self, problem: Problem, down: ScaffoldMessage, client: Params, shard: Shard
    ) -> Model:
        """Judge every client on the global model."""
        return Model(problem, down.params)

    def contribute(self, problem: Problem, upload: ScaffoldMessage, weight: float) -> ScaffoldSum:
        """Sum plainly."""
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
