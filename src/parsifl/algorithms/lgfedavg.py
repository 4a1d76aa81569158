"""LG-FedAvg: representations of each client's own, and a shared head."""

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
class LGFedAvg(LocalSGD, PartialMean):
    r"""Body and head are trained together; only the head is averaged.

    .. math:: (b_i, h_i) \leftarrow (b_i, h_i) - \eta\, g_i(b_i, h_i), \qquad
              h \leftarrow \sum_i p_i h_i

    with eta = `lr` and p_i by `weighting`. Sent: the head, both ways. Kept: the body b_i on the
    client.
    """

    cites: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global "
        "Representations, 2020"
    )

    def shares(self, problem: Layered, name: str) -> bool:
        """Share the head alone."""
        return name in problem.head

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Layered, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Train all layers and keep the body."""
        rate = self.rate(shard.round)
        start = {**down, **client}
        trained = sgd(
            problem, start, shard["train"], rate, momentum=self.momentum, decay=self.decay
        )
        head, body = self.split(problem, trained)
        return Local(body, head)
