"""FedNova: normalized averaging for devices that take different numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parsifl.algorithms._bases.averaging import Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd


@dataclass(frozen=True)
class NovaUpload:
    """The normalized change d_i of a device, and its effective number of steps, ||a_i||_1."""

    change: Params
    length: Tensor


NovaSum = tuple[NovaUpload, Tensor]  # the weighted sum of the uploads, and the total weight


@final
@dataclass(frozen=True)
class FedNova(
    Weighted, LocalSgd, AdditiveAlgorithm[Problem, Params, None, Params, NovaUpload, NovaSum]
):
    r"""Changes are averaged as if all devices had taken the same number of steps.

    .. math:: w \leftarrow w - \Bigl(\sum_i p_i \|a_i\|_1\Bigr) \sum_i p_i d_i, \quad
              d_i = \frac{w - w_i}{\|a_i\|_1}, \quad \|a_i\|_1 = \frac{1}{1 - \rho}
              \left(\tau_i - \rho \frac{1 - \rho^{\tau_i}}{1 - \rho}\right)

    with w_i after tau_i SGD steps ("epochs" or "local_steps" of the device's profile), rho =
    `momentum` and p_i by `weighting`. Without momentum, ||a_i||_1 is tau_i. With equal steps this
    is FedAvg. Sent: the model down, d_i and one number up. Kept: nothing.
    """

    cites: ClassVar[str] = (
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated "
        "Optimization, NeurIPS 2020"
    )

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the problem's initial parameters."""
        return problem.init(key)

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the global model."""
        return Model(problem, server)

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, NovaUpload]:
        """Run SGD; divide the change by the effective number of steps, if there were any."""
        trained = sgd(problem, received, data["train"], self.sgd(data.round))
        steps = data["train"].active.sum().to(next(iter(received.values())).dtype)
        rho = self.momentum
        length = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        change = tree.map(lambda w, v: (w - v) / length.clamp(min=1), received, trained)
        return ClientUpdate(None, NovaUpload(change, length))

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received)

    def contribute(self, problem: Problem, upload: NovaUpload, weight: float) -> NovaSum:
        """Weight the change and the effective number of steps."""
        return tree.scale(weight, upload), upload.length.new_tensor(weight)

    def aggregate(self, problem: Problem, server: Params, total: NovaSum, key: Key) -> Params:
        """Move by the mean normalized change times the effective number of steps."""
        upload, weight = total
        factor = upload.length / weight / weight
        return tree.map(lambda w, change: w - factor * change, server, upload.change)
