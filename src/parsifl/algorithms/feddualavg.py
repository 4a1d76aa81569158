"""FedDualAvg: dual averaging, means of dual variables, which preserve sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.algorithms._bases.proximal import ProximalSettings
from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.errors import ConfigError
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
class FedDualAvg(
    ProximalSettings,
    SparsitySettings,
    LocalSgd,
    Weighted,
    AdditiveAlgorithm[Problem, Dual, None, Dual, Dual, DualSum],
):
    r"""Federated dual averaging with an l1 or a hard-thresholding proximal operator.

    .. math:: w = \mathrm{prox}_{h\psi}(z_i), \quad z_i \leftarrow z_i - \eta g_i(w), \quad
              h \leftarrow h + \eta \quad (K \text{ times}), \qquad
              z \leftarrow z + \eta_s \overline{\Delta z}, \quad
              h \leftarrow h + \eta_s \overline{\Delta h}

    with eta = `lr`, eta_s = `server_lr`, K = `local_steps` and psi by `prox`; the model is
    :math:`\mathrm{prox}_{h\psi}(z)`. Sent: the dual, both ways.
    Kept: nothing.
    """

    cites: ClassVar[str] = "Yuan, Zaheer and Reddi, Federated Composite Optimization, ICML 2021"

    def check(self) -> None:
        """Reject momentum, for which dual averaging has no use."""
        if self.momentum:
            raise ConfigError(f"momentum = {self.momentum:g}: FedDualAvg takes plain steps, set 0")

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Dual:
        """Return the initial parameters as dual."""
        start = problem.init(key)
        dtype = next(iter(start.values())).dtype
        return Dual(start, torch.zeros((), dtype=dtype))

    def broadcast(self, problem: Problem, server: Dual, client: ClientInfo, key: Key) -> Dual:
        """Send the dual."""
        return server

    def model(self, problem: Problem, server: Dual) -> Model:
        """Return the primal model."""
        return Model(problem, self._primal(problem, server))

    def _primal(self, problem: Problem, dual: Dual) -> Params:
        return self.apply_prox(problem, dual.params, dual.elapsed, self.sparsity)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request mini-batches, or full batches."""
        spec = self.batch_spec(client)
        return DataRequest({"train": replace(spec, batch_size=None) if self.full_batch else spec})

    def client_update(
        self, problem: Problem, received: Dual, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Dual]:
        """Move the dual against gradients at the primal point."""
        dual = received
        for batch in data["train"]:
            primal = self._primal(problem, dual)
            gradients = gradient(problem, primal, batch)
            if self.weight_decay:
                gradients = tree.axpy(self.weight_decay, primal, gradients)
            step = batch.active.to(dual.elapsed.dtype) * self.learning_rate(data.round)
            dual = Dual(tree.axpy(-step, gradients, dual.params), dual.elapsed + step)
        return ClientUpdate(None, dual)

    def personalize(
        self, problem: Problem, received: Dual, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the primal model."""
        return Model(problem, self._primal(problem, received))

    def contribute(self, problem: Problem, upload: Dual, weight: float) -> DualSum:
        """Weight the dual and its time."""
        mean = Mean.of(upload.params, weight)
        return DualSum(mean, weight * upload.elapsed, upload.elapsed.new_tensor(weight))

    def aggregate(self, problem: Problem, server: Dual, total: DualSum, key: Key) -> Dual:
        """Move the dual and the time by their mean changes."""
        change = tree.subtract(total.params.value(), server.params)
        params = tree.axpy(self.server_lr, change, server.params)
        passed = total.elapsed / total.weight - server.elapsed
        return Dual(params, server.elapsed + self.server_lr * passed)
