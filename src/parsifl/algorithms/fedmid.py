"""FedMid: local proximal SGD, and a proximal step on the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.algorithms._bases.proximal import Proximal
from parsifl.core import leaves, tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.constraint import kept_places
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.solvers.thresholding import SoftThreshold, Steps, threshold


@final
@dataclass(frozen=True)
class FedMid(Proximal, Averaging[Problem, None]):
    r"""Federated mirror descent: proximal steps on the clients and on the server.

    .. math:: w_i \leftarrow \mathrm{prox}_{\eta\psi}(w_i - \eta g_i(w_i)) \quad (K \text{ times}),
              \qquad w \leftarrow \mathrm{prox}_{\eta_s \eta K \psi}(w + \eta_s \overline{\Delta w})

    with eta = `lr`, eta_s = `server_lr`, K = `steps` and psi by `prox`. Sent: the model, both
    ways.
    """

    cites: ClassVar[str] = "Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021"

    def check(self) -> None:
        """Refuse epochs: the server's step needs one number K for all clients."""
        if self.epochs is not None:
            raise ConfigError("FedMid counts local work in steps; set steps= instead of epochs=")

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the initial parameters, thresholded if the prox is hard."""
        start = problem.init(key)
        return self.project(problem, start) if self.prox == "hard" else start

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run proximal SGD."""
        rate, batches = self.learning_rate(data.round), data["train"]
        pace = Steps(rate, self.momentum, self.weight_decay)
        if self.prox == "hard":
            return ClientUpdate(
                None, leaves.densify(threshold(problem, received, batches, pace, self))
            )
        rule = SoftThreshold(self.lam, next(iter(kept_places(problem).values()), ()))
        trained = sgd(
            problem, received, batches, SgdConfig(rate, self.momentum, self.weight_decay), rule=rule
        )
        return ClientUpdate(None, trained)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Move by the mean change, then apply the proximal operator of K local steps."""
        change = tree.subtract(total.value(), server)
        moved = tree.axpy(self.server_lr, change, server)
        return self.proximal(
            problem, moved, self.server_lr * self.learning_rate(key.round) * self.local_steps
        )
