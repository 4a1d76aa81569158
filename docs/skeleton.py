"""A template for a new algorithm: local SGD with an l1 penalty, then a mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parsifl.base import (
    Aux,
    Averaging,
    ClientRoundData,
    ClientUpdate,
    LocalSgd,
    NonNegative,
    Params,
    Problem,
    Rule,
    sgd,
)


@final
@dataclass(frozen=True)
class Shrink(Rule):
    """After each SGD step, move every weight towards zero by lr * strength."""

    strength: float = 0.0

    def after_(self, w: Tensor, aux: Aux, lr: float) -> None:
        """Shrink in place; `w` may hold the weights of many clients, one per row."""
        w.sub_(w.clamp(-lr * self.strength, lr * self.strength))


@final
@dataclass(frozen=True)
class FedShrink(LocalSgd, Averaging[Problem, None]):
    r"""Proximal SGD for an l1 penalty on each client; the server averages.

    .. math:: w_i \leftarrow \operatorname{soft}(w_i - \eta g_i(w_i), \eta \lambda) \quad
              (K \text{ times}), \qquad w \leftarrow \sum_i p_i w_i

    with eta = `lr`, K = `local_steps`, lambda = `lam` and p_i by `weighting`. Sent: the model,
    both ways, without its zeros. Kept: nothing.

    Parameters
    ----------
    lam
        Weight of the l1 penalty.
    """

    cites: ClassVar[str] = "An example for the documentation; see FedMid for a published algorithm"

    lam: NonNegative = 0.001

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Train with the rule."""
        trained = sgd(problem, received, data["train"], self.sgd(data.round), rule=Shrink(self.lam))
        return ClientUpdate(None, trained)
