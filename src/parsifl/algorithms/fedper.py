"""FedPer: a shared body, and a head for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.partial import PartialMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.problem import Layered, Params
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class FedPer(LocalSGD, PartialMean):
    r"""Body and head are trained together; only the body is averaged.

    .. math:: (b_i, h_i) \leftarrow (b_i, h_i) - \eta\, g_i(b_i, h_i), \qquad
              b \leftarrow \sum_i p_i b_i

    with eta = `lr` and p_i by `weighting`. Sent: the body, both ways. Kept: the head h_i on the
    client.
    """

    cites: ClassVar[str] = (
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019"
    )

    def shares(self, problem: Layered, name: str) -> bool:
        """Share everything but the head."""
        return name not in problem.head

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Layered, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Train all layers and keep the head."""
        rate = self.rate(shard.round)
        start = {**down, **client}
        trained = sgd(
            problem, start, shard["train"], rate, momentum=self.momentum, decay=self.decay
        )
        body, head = self.split(problem, trained)
        return Local(head, body)
