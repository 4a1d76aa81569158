"""Per-FedAvg: a global model that adapts to a client in one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import Batch, BatchSpec, ClientRoundData, DataRequest, Partial
from parsifl.core.config import Count, Positive
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.maml import first_order_maml, part, shifted, slope, step_
from parsifl.solvers.sgd import SgdConfig, owned, sgd


@final
@dataclass(frozen=True)
class PerFedAvg(LocalSgd, Averaging[Problem, None]):
    r"""Local meta-learning steps, then a mean; each client adapts the result to itself.

    .. math:: w_i' = w_i - \alpha g_i(w_i; D), \qquad
              v = g_i(w_i'; D'), \qquad
              w_i \leftarrow w_i - \eta \left(v - \alpha
                  \frac{g_i(w_i + \delta v; D'') - g_i(w_i - \delta v; D'')}{2 \delta}\right)

    with eta = `lr`, alpha = `adapt_lr` and delta = `delta`; the first-order variant leaves the
    difference out. D, D', D'' are disjoint parts of one sample of the client's training rows, each
    of `batch_size` rows. Sent: the model, both ways. Kept: nothing.

    Parameters
    ----------
    variant
        "first-order" or "hessian-free".
    adapt_lr
        Step size of the adaptation.
    adapt_steps
        Number of adaptation steps, which yield the personal model.
    delta
        Half the width of the difference that approximates a Hessian-vector product.
    """

    cites: ClassVar[str] = (
        "Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A "
        "Model-Agnostic Meta-Learning Approach, NeurIPS 2020"
    )

    variant: Literal["first-order", "hessian-free"] = "first-order"
    adapt_lr: Positive = 0.05
    adapt_steps: Count = 1
    delta: Positive = 1e-3
    last_batch: Partial = "wrap"

    def check(self) -> None:
        """Reject settings under which a part of a batch would be empty or without meaning."""
        if self.last_batch == "pad":
            raise ConfigError(
                'last_batch = "pad" would leave D\' empty on small clients: use "wrap" or "drop"'
            )
        if self.momentum:
            raise ConfigError(f"momentum = {self.momentum:g}: Per-FedAvg takes plain steps, set 0")

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request two or three mini-batches per step, as parts of a larger one."""
        parts = 2 if self.variant == "first-order" else 3
        spec = replace(self.batch_spec(client), batch_size=parts * self.batch_size)
        return DataRequest({"train": spec})

    def personalization_batches(self, client: ClientInfo) -> DataRequest:
        """Request training rows for the adaptation."""
        spec = BatchSpec(self.batch_size, steps=self.adapt_steps, last_batch="wrap")
        return DataRequest({"adapt": spec})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Take meta-learning steps from the received model."""
        batches, config = data["train"], self.sgd(data.round)
        if self.variant == "first-order":
            trained = first_order_maml(problem, received, batches, config, inner_lr=self.adapt_lr)
            return ClientUpdate(None, trained)
        if len(batches) == 0:
            return ClientUpdate(None, dict(received))
        params = owned(received, batches)
        for batch in batches:
            step_(params, self._direction(problem, params, batch), config.lr, batch, batches.ragged)
        return ClientUpdate(None, params)

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model, adapted to its training rows."""
        config = SgdConfig(self.adapt_lr, weight_decay=self.weight_decay)
        return Model(problem, sgd(problem, received, data["adapt"], config))

    def _direction(self, problem: Problem, params: Params, batch: Batch) -> Params:
        first, second, third = (part(batch, number, 3) for number in range(3))
        adapted = shifted(params, -self.adapt_lr, slope(problem, params, first, self.weight_decay))
        direction = slope(problem, adapted, second, self.weight_decay)
        ahead = slope(problem, shifted(params, self.delta, direction), third, self.weight_decay)
        behind = slope(problem, shifted(params, -self.delta, direction), third, self.weight_decay)
        factor = -self.adapt_lr / (2 * self.delta)
        return shifted(direction, factor, tree.subtract(ahead, behind))
