"""FedMid: local proximal SGD, and a proximal step on the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging, Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.algorithms._bases.proximal import ProximalSettings
from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core import leaves, tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.constraint import kept_places
from parsifl.solvers.sgd import sgd
from parsifl.solvers.thresholding import SoftThresholdRule, threshold


@final
@dataclass(frozen=True)
class FedMid(ProximalSettings, SparsitySettings, LocalSgd, Averaging[Problem, None]):
    r"""Federated mirror descent: proximal steps on the clients and on the server.

    .. math:: w_i \leftarrow \mathrm{prox}_{\eta\psi}(w_i - \eta g_i(w_i)) \quad (K \text{ times}),
              \qquad w \leftarrow \mathrm{prox}_{\eta_s \eta K \psi}(w + \eta_s \overline{\Delta w})

    with eta = `lr`, eta_s = `server_lr`, K = `local_steps` (the same on every device) and psi by
    `prox`. Sent: the model, both ways. Kept: nothing.
    """

    cites: ClassVar[str] = "Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021"
    equal_steps: ClassVar[bool] = True  # the server's step contains K

    def check(self) -> None:
        """Reject epochs: the server's step needs one number K for all clients."""
        if self.epochs is not None:
            raise ConfigError(
                f"FedMid does not support epochs, got epochs={self.epochs:g}; set local_steps "
                "instead, which also scales the server's step"
            )

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the initial parameters, thresholded if `prox` is "hard"."""
        start = problem.init(key)
        return self.sparsity.project(problem, start) if self.prox == "hard" else start

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request mini-batches, or full batches."""
        spec = self.batch_spec(client)
        return DataRequest({"train": replace(spec, batch_size=None) if self.full_batch else spec})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run proximal SGD."""
        batches, config = data["train"], self.sgd(data.round)
        if self.prox == "hard":
            trained = threshold(problem, received, batches, config, self.sparsity)
            return ClientUpdate(None, leaves.densify(trained))
        rule = SoftThresholdRule(self.lam, kept_places(problem))
        return ClientUpdate(None, sgd(problem, received, batches, config, rule=rule))

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Move by the mean change, then apply the proximal operator of K local steps."""
        change = tree.subtract(total.value(), server)
        moved = tree.axpy(self.server_lr, change, server)
        step = self.server_lr * self.learning_rate(key.round) * self.local_steps
        return self.apply_prox(problem, moved, step, self.sparsity)
