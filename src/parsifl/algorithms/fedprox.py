"""FedProx: local SGD that is pulled back to the model it started from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl import tree
from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import WeightedMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import NonNegative
from parsifl.problem import Params, Problem
from parsifl.solvers.rules import Affine
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class FedProx(LocalSGD, WeightedMean[Problem]):
    r"""FedAvg with a proximal term towards the global model.

    .. math:: w_i \leftarrow w_i - \eta \left(g_i(w_i) + \mu (w_i - w)\right), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr` and mu = `mu`. Sent: the model, both ways.
    """

    cites: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: NonNegative = 1e-4

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Run SGD on f_i(w) + (mu/2) |w - w_t|^2."""
        trained = sgd(
            problem,
            down,
            shard["train"],
            self.rate(shard.round),
            rule=Affine(self.mu),
            aux=(tree.scale(-self.mu, down),),
            momentum=self.momentum,
            decay=self.decay,
        )
        return Local(None, trained)
