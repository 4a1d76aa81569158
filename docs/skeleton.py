"""A new algorithm to copy: local SGD whose small weights shrink to zero, then a mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import WeightedMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import NonNegative
from parsifl.problem import Params, Problem
from parsifl.solvers.rules import Aux, Rule
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class Shrink(Rule):
    """What is added to SGD: after each step weights move towards zero by lr * strength."""

    strength: float = 0.0

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Shrink in place; `w` may hold many clients, one a row."""
        w.sub_(w.clamp(-lr * self.strength, lr * self.strength))


@final
@dataclass(frozen=True)
class FedShrink(LocalSGD, WeightedMean[Problem]):
    r"""Proximal SGD for an l1 penalty on every client; the server averages.

    .. math:: w_i \leftarrow \operatorname{soft}(w_i - \eta g_i(w_i), \eta \lambda) \quad
              (K \text{ times}), \qquad w \leftarrow \sum_i p_i w_i

    with eta = `lr`, K = `steps`, lambda = `lam` and p_i by `weighting`. Sent: the model, both
    ways; zeros cost next to nothing. Kept: nothing.
    """

    cites: ClassVar[str] = "An example for the documentation; see FedMid for a published method"

    lam: NonNegative = 0.001

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Shrink after every step."""
        trained = sgd(
            problem,
            down,
            shard["train"],
            self.rate(shard.round),
            rule=Shrink(self.lam),
            momentum=self.momentum,
            decay=self.decay,
        )
        return Local(None, trained)
