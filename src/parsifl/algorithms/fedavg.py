"""FedAvg: local SGD, then a weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import WeightedMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.problem import Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class FedAvg(LocalSGD, WeightedMean[Problem]):
    r"""Every client takes K SGD steps from the global model; the server averages.

    .. math:: w_i \leftarrow w_i - \eta g_i(w_i) \quad (K \text{ times}), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr`, K = `steps` and p_i by `weighting`. Sent: the model, both ways.
    """

    cites: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Run plain SGD from the received model."""
        rate = self.rate(shard.round)
        trained = sgd(problem, down, shard["train"], rate, momentum=self.momentum, decay=self.decay)
        return Local(None, trained)
