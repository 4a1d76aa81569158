"""FedRep: a shared representation, and heads that are fitted to it first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.layer_sharing import PartialMean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import NonNegative
from parsifl.core.problem import Layered, Params
from parsifl.solvers.sgd import SgdConfig, sgd


@final
@dataclass(frozen=True)
class FedRep(LocalSgd, PartialMean):
    r"""The head is fitted to the frozen body, then the body to the frozen head.

    .. math:: h_i \leftarrow h_i - \eta\, \nabla_h f_i(b, h_i), \qquad
              b_i \leftarrow b_i - \eta\, \nabla_b f_i(b_i, h_i), \qquad
              b \leftarrow \sum_i p_i b_i

    with eta = `lr` and p_i by `weighting`. Sent: the body, both ways. Kept: the head h_i on the
    client.

    Parameters
    ----------
    head_epochs
        Epochs of the head a round; None: as long as the body.
    """

    cites: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, "
        "ICML 2021"
    )

    head_epochs: NonNegative | None = None

    def shares(self, problem: Layered, name: str) -> bool:
        """Share everything but the head."""
        return name not in problem.head

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read separate mini-batches for the head and for the body."""
        body = head = self.batch_spec(client)
        if self.head_epochs is not None:
            head = BatchSpec(self.batch_size, epochs=self.head_epochs, last_batch=self.last_batch)
        return DataRequest({"body": body, "head": head})

    def client_update(
        self, problem: Layered, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Fit the head, then the body."""
        rate, momentum, decay = self.learning_rate(data.round), self.momentum, self.weight_decay
        head = sgd(problem, state, data["head"], SgdConfig(rate, momentum, decay), frozen=received)
        body = sgd(problem, received, data["body"], SgdConfig(rate, momentum, decay), frozen=head)
        return ClientUpdate(head, body)
