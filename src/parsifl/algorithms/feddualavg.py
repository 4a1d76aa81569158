"""FedDualAvg: dual averaging, where means are taken of duals and sparsity survives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.proximal import Proximal
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import gradient


@dataclass(frozen=True)
class Dual:
    """Dual variables z and the sum h of the step sizes taken so far."""

    params: Params
    elapsed: Tensor


@dataclass(frozen=True)
class DualSum:
    """Weighted sums of z (with weights) and of h."""

    params: Mean
    elapsed: Tensor
    weight: Tensor


@final
@dataclass(frozen=True)
class FedDualAvg(Proximal, AdditiveAlgorithm[Problem, Dual, None, Dual, Dual, DualSum]):
    r"""Federated dual averaging with an l1 or a hard-thresholding proximal operator.

    .. math:: w = \mathrm{prox}_{h\psi}(z_i), \quad z_i \leftarrow z_i - \eta g_i(w), \quad
              h \leftarrow h + \eta \quad (K \text{ times}), \qquad
              z \leftarrow z + \eta_s \overline{\Delta z}, \quad
              h \leftarrow h + \eta_s \overline{\Delta h}

    with eta = `lr`, eta_s = `server_lr`, K = `steps` and psi by `prox`; the model is
    :math:`\mathrm{prox}_{h\psi}(z)`. Momentum is not used. Sent: the dual, both ways.
    """

    cites: ClassVar[str] = "Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021"

    weighting: Literal["samples", "uniform"] = "samples"

    def weight(self, client: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(client.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Dual:
        """Start with the initial parameters as dual."""
        start = problem.init(key)
        dtype = next(iter(start.values())).dtype
        return Dual(start, torch.zeros((), dtype=dtype))

    def broadcast(self, problem: Problem, server: Dual, client: ClientInfo, key: Key) -> Dual:
        """Send the dual."""
        return server

    def model(self, problem: Problem, server: Dual) -> Model:
        """Return the primal model."""
        return Model(problem, self.proximal(problem, server.params, server.elapsed))

    def init_client(self, problem: Problem, client: ClientInfo, received: Dual, key: Key) -> None:
        """Keep nothing on the client."""
        return None

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of dual averaging."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Dual, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Dual]:
        """Move the dual against gradients at the primal point."""
        rate, batches = self.learning_rate(data.round), data["train"]
        dual, elapsed = received.params, received.elapsed
        for batch in batches:
            primal = self.proximal(problem, dual, elapsed)
            slope = gradient(problem, primal, batch)
            if self.weight_decay:
                slope = tree.axpy(self.weight_decay, primal, slope)
            pace = batch.active.to(elapsed.dtype) * rate
            dual = tree.axpy(-pace, slope, dual)
            elapsed = elapsed + pace
        return ClientUpdate(None, Dual(dual, elapsed))

    def personalize(
        self, problem: Problem, received: Dual, state: None, data: ClientRoundData
    ) -> Model:
        """Judge every client on the primal model that it receives."""
        return Model(problem, self.proximal(problem, received.params, received.elapsed))

    def contribute(self, problem: Problem, upload: Dual, weight: float) -> DualSum:
        """Weigh the dual and its time."""
        mean = Mean.of(upload.params, weight)
        return DualSum(mean, weight * upload.elapsed, upload.elapsed.new_tensor(weight))

    def aggregate(self, problem: Problem, server: Dual, total: DualSum, key: Key) -> Dual:
        """Move the dual and the time by their mean changes."""
        change = tree.subtract(total.params.value(), server.params)
        params = tree.axpy(self.server_lr, change, server.params)
        passed = total.elapsed / total.weight - server.elapsed
        return Dual(params, server.elapsed + self.server_lr * passed)
