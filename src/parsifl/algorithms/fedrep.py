"""FedRep: a shared representation, and heads that are fitted to it first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.layer_sharing import LayerSharing
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import NonNegative
from parsifl.core.problem import Layered, Params
from parsifl.solvers.sgd import sgd


@final
@dataclass(frozen=True)
class FedRep(LayerSharing):
    r"""Clients fit the head to the frozen body, then the body to the frozen head.

    .. math:: h_i \leftarrow h_i - \eta\, \nabla_h f_i(b, h_i), \qquad
              b_i \leftarrow b_i - \eta\, \nabla_b f_i(b_i, h_i), \qquad
              b \leftarrow \sum_i p_i b_i

    with eta = `lr` and p_i by `weighting`. Sent: the body, both ways. Kept: the head h_i on the
    client.

    Parameters
    ----------
    head_epochs
        Epochs of the head per round; None: as many steps as the body.
    """

    cites: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, "
        "ICML 2021"
    )

    head_epochs: NonNegative | None = None

    def shares(self, problem: Layered, name: str) -> bool:
        """Share everything except the head."""
        return name not in problem.head

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request separate mini-batches for the head and for the body."""
        head = self.batch_spec(client, epochs=self.head_epochs)
        return DataRequest({"body": self.batch_spec(client), "head": head})

    def client_update(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Fit the head, then the body."""
        config = self.sgd(data.round)
        head = sgd(problem, state, data["head"], config, frozen=received)
        body = sgd(problem, received, data["body"], config, frozen=head)
        return ClientUpdate(head, body)
