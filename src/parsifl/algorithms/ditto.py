"""Ditto: a global model, and personal models regularized towards it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import NonNegative
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.solvers.update_rules import LinearRule


@final
@dataclass(frozen=True)
class Ditto(LocalSgd, Averaging[Problem, Params]):
    r"""FedAvg for the global model, and a regularized personal model per client.

    .. math:: v_i \leftarrow v_i - \eta \left(g_i(v_i) + \lambda (v_i - w)\right)

    with eta = `lr` and lambda = `lam`, where w is the model received in this round. Sent: the
    global model, both ways. Kept: the personal model v_i on the client.

    Parameters
    ----------
    lam
        Strength of the pull towards the global model.
    personal_epochs
        Epochs of the personal model per round; None: as many steps as the global model.
    """

    cites: ClassVar[str] = (
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    )
    supports_buffers: ClassVar[bool] = True

    lam: NonNegative = 0.1
    personal_epochs: NonNegative | None = None

    def init_client(
        self, problem: Problem, client: ClientInfo, received: Params, key: Key
    ) -> Params:
        """Return the first model received."""
        return received

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request separate mini-batches for the global and for the personal model."""
        personal = self.batch_spec(client, epochs=self.personal_epochs)
        return DataRequest({"shared": self.batch_spec(client), "personal": personal})

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train the global model, then the personal one with a pull towards the received model."""
        config = self.sgd(data.round)
        shared = sgd(problem, received, data["shared"], config)
        rule, anchor = LinearRule(self.lam), tree.scale(-self.lam, received)
        personal = sgd(problem, state, data["personal"], config, rule=rule, aux=(anchor,))
        return ClientUpdate(personal, shared)

    def personalize(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on its personal model."""
        return Model(problem, state)
