"""FedRep: a shared representation, and heads that are fitted to it first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.partial import PartialMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import NonNegative
from parsifl.problem import Layered, Params
from parsifl.solvers.sgd import sgd
from parsifl.work import Draw, Shard, Work


@final
@dataclass(frozen=True)
class FedRep(LocalSGD, PartialMean):
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

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read separate mini-batches for the head and for the body."""
        body = head = self.draw(info)
        if self.head_epochs is not None:
            head = Draw(self.batch, epochs=self.head_epochs, partial=self.partial)
        return Work({"body": body, "head": head})

    def local(
        self, problem: Layered, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Fit the head, then the body."""
        rate, momentum, decay = self.rate(shard.round), self.momentum, self.decay
        head = sgd(
            problem, client, shard["head"], rate, momentum=momentum, decay=decay, frozen=down
        )
        body = sgd(problem, down, shard["body"], rate, momentum=momentum, decay=decay, frozen=head)
        return Local(head, body)
