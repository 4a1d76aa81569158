"""APFL: a mixture of a personal and the global model per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import Batch, ClientRoundData
from parsifl.core.config import Fraction
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import gradient


@dataclass(frozen=True)
class ApflClient:
    """A client's own model v_i and its share alpha_i in the mixture."""

    own: Params
    alpha: Tensor


@final
@dataclass(frozen=True)
class APFL(LocalSgd, Averaging[Problem, ApflClient]):
    r"""FedAvg for w, and a personal model v_i that is trained for its share in a mixture.

    .. math:: \bar v_i = \alpha_i v_i + (1 - \alpha_i) w_i, \quad
              w_i \leftarrow w_i - \eta\, g_i(w_i), \quad
              v_i \leftarrow v_i - \eta\, \alpha_i\, g_i(\bar v_i)

    .. math:: \alpha_i \leftarrow \alpha_i - \eta \langle g_i(\bar v_i), v_i - w_i \rangle
              \quad \text{(if adaptive; at the first step of a round, kept within [0, 1])}

    with eta = `lr`; both gradients of a step are taken on the same batch. Sent: w, both ways.
    Kept: v_i and alpha_i on the client. A client is evaluated on the mixture with the model
    that it receives.

    Parameters
    ----------
    alpha
        The share alpha_i; its initial value if `adaptive`.
    adaptive
        Whether alpha_i is learned.
    """

    cites: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, 2020"

    alpha: Fraction = 0.5
    adaptive: bool = False

    def check(self) -> None:
        """Reject momentum, which the algorithm does not use."""
        if self.momentum:
            raise ConfigError(f"APFL does not support momentum: set it to 0, got {self.momentum}")

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> ApflClient:
        """Return the first model received."""
        return ApflClient(received, next(iter(received.values())).new_tensor(self.alpha))

    def client_update(
        self, problem: Problem, received: Params, state: ApflClient, data: ClientRoundData
    ) -> ClientUpdate[ApflClient, Params]:
        """Step both models on every batch."""
        lr, batches = self.learning_rate(data.round), data["train"]
        both = (received, state)
        for number, batch in enumerate(batches):
            moved = self._step(problem, *both, batch, lr, first=number == 0)
            both = tree.where(batch.active, moved, both) if batches.ragged else moved
        shared, mixed = both
        return ClientUpdate(mixed, shared, {"alpha": mixed.alpha})

    def _step(
        self,
        problem: Problem,
        shared: Params,
        client: ApflClient,
        batch: Batch,
        lr: float,
        *,
        first: bool,
    ) -> tuple[Params, ApflClient]:
        personal, alpha = client.own, client.alpha
        mixed_gradient = gradient(problem, mix(alpha, personal, shared), batch)
        if self.adaptive and first:
            derivative = tree.dot(mixed_gradient, tree.subtract(personal, shared))
            alpha = (alpha - lr * derivative).clamp(0.0, 1.0)
        next_own = self._descend(personal, tree.scale(client.alpha, mixed_gradient), lr)
        next_shared = self._descend(shared, gradient(problem, shared, batch), lr)
        return next_shared, ApflClient(next_own, alpha)

    def _descend(self, params: Params, gradients: Params, lr: float) -> Params:
        keep = 1 - lr * self.weight_decay
        return tree.map(lambda w, g: torch.sub(keep * w, g, alpha=lr), params, gradients)

    def personalize(
        self, problem: Problem, received: Params, state: ApflClient, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on its mixture."""
        return Model(problem, mix(state.alpha, state.own, received))


def mix(alpha: Tensor, personal: Params, shared: Params) -> Params:
    """Return alpha * own + (1 - alpha) * shared."""
    return tree.map(lambda v, w: alpha * v + (1 - alpha) * w, personal, shared)
