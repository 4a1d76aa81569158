"""HeurFedAMP: FedAMP with a fixed weight of the own model and cosine attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.algorithms._bases.attention import Attention
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.config import Fraction, NonNegative, Positive
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Params, Problem
from parsifl.solvers.coupled import Coupled, alternate


@final
@dataclass(frozen=True)
class HeurFedAMP(Attention):
    r"""Attentive message passing by cosine similarity, for deep models.

    .. math:: u_i = \sum_j \xi_{ij} w_j, \quad \xi_{ii} = \alpha, \quad
              \xi_{ij} = (1 - \alpha) \frac{e^{\sigma \cos(w_i, w_j)}}
                  {\sum_{k \ne i} e^{\sigma \cos(w_i, w_k)}}, \quad
              w_i = \arg\min f_i(w) + \tfrac{\lambda}{2} \|w - u_i\|^2

    with alpha = `own`, sigma = `sigma`, lambda = `lam`; the minimization is SGD with `lr`. Sent:
    u_i to client i, w_i back. Kept: w_i on the client and, as the algorithm requires, on the
    server. There is no global model.

    Parameters
    ----------
    own
        alpha, the weight of a client's own model in its mixture.
    outer_lr
        None is the algorithm above. A step size eta is the variant "modified to iterate once" of
        FedMac's paper, as we read it: both a personal model theta_i and an anchor a_i start at
        u_i, each mini-batch takes one step of theta_i with the pull towards a_i and then moves
        a_i by eta lambda (theta_i - a_i). The anchor is sent, and the client keeps theta_i.
        `start` is not read.
    """

    cites: ClassVar[str] = (
        "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    )

    lam: NonNegative = 5.0
    sigma: Positive = 50.0
    own: Fraction = 0.5
    outer_lr: Positive | None = None

    def check(self) -> None:
        """Reject steps at which the model or its anchor diverges."""
        super().check()
        if self.outer_lr is not None and self.outer_lr * self.lam >= 2:
            raise ConfigError(
                f"outer_lr * lam = {self.outer_lr * self.lam:g} must be below 2, or the anchor "
                "diverges; lower outer_lr"
            )

    def client_update(
        self, problem: Problem, received: Params, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, Params]:
        """Train towards the mixture, which follows the model if `outer_lr` is set."""
        if self.outer_lr is None:
            return super().client_update(problem, received, state, data)
        rule = Coupled(rate=self.outer_lr, lam=self.lam, decay=self.lam)
        config = self.sgd(data.round)
        theta, anchor = alternate(problem, received, data["train"], config, rule=rule)
        return ClientUpdate(theta, anchor)

    def attention(self, models: Tensor) -> Tensor:
        """Return xi, from the angles between the models."""
        others = len(models) - 1
        if not others:
            return torch.ones_like(models[:, :1])
        unit = functional.normalize(models, dim=1)
        itself = torch.eye(len(models), dtype=torch.bool, device=models.device)
        similarity = (self.sigma * unit @ unit.T).masked_fill(itself, float("-inf"))
        return (1 - self.own) * similarity.softmax(1) + self.own * itself.to(models.dtype)
