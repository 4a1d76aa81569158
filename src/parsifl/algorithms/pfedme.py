"""pFedMe: personal models by Moreau envelopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.moreau import MoreauEnvelope
from parsifl.core.algorithm import Conformance
from parsifl.core.config import Count, NonNegative, Positive
from parsifl.core.errors import ConfigError
from parsifl.solvers.coupled import Coupled


@final
@dataclass(frozen=True)
class PFedMe(MoreauEnvelope):
    r"""Personal models regularized by their squared distance to the global one.

    .. math:: \theta_i \leftarrow \theta_i - \eta_p \left(g_i(\theta_i)
                  + \lambda (\theta_i - w_i) + \gamma \tanh(\theta_i / \rho)\right)
                  \; (K \text{ times}), \quad
              w_i \leftarrow w_i - \eta \lambda (w_i - \theta_i), \quad
              w \leftarrow (1 - \beta) w + \tfrac{\beta}{S} \sum_{i \in S} w_i

    with eta_p = `lr`, eta = `outer_lr`, lambda = `lam`, K = `inner`, and `local_steps` outer
    steps. gamma > 0 is the sparse pFedMe that FedMac's paper compares with. Both models start at
    the received one in each round. Sent: the model, both ways. Kept: nothing.

    The defaults of `lr`, `outer_lr`, `lam` and `inner` are those of pFedMe's own experiments;
    FedMac's paper has 0.05, 0.02, 15 and 1.
    """

    cites: ClassVar[str] = (
        "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    )

    conformance: ClassVar[Conformance] = Conformance({"inner": 2})

    lr: Positive = 0.09
    outer_lr: Positive = 0.005
    lam: NonNegative = 15.0
    inner: Count = 5

    def check(self) -> None:
        """Reject step sizes for which theta diverges."""
        super().check()
        if self.lr * self.lam >= 2:
            raise ConfigError(
                f"lr * lam = {self.lr * self.lam:g} must be below 2, or theta diverges; lower lr"
            )

    def rule(self) -> Coupled:
        """Return the coupling (lambda / 2) |theta - w_i|^2."""
        return Coupled(
            rate=self.outer_lr,
            lam=self.lam,
            decay=self.lam,
            gamma=self.gamma,
            gamma_w=self.gamma_w,
            rho=self.rho,
            proximal=self.l1 == "proximal",
        )
