"""HeurFedAMP: FedAMP with a fixed weight of the own model and cosine attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.algorithms._bases.attention import Attention
from parsifl.core.config import Fraction, NonNegative, Positive


@final
@dataclass(frozen=True)
class HeurFedAMP(Attention):
    r"""Attentive message passing by cosine similarity, made for deep models.

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
    """

    cites: ClassVar[str] = (
        "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    )

    lam: NonNegative = 5.0
    sigma: Positive = 50.0
    own: Fraction = 0.5

    def attention(self, models: Tensor) -> Tensor:
        """Return xi, from the angles between the models."""
        others = len(models) - 1
        if not others:
            return torch.ones_like(models[:, :1])
        unit = functional.normalize(models, dim=1)
        itself = torch.eye(len(models), dtype=torch.bool, device=models.device)
        similarity = (self.sigma * unit @ unit.T).masked_fill(itself, float("-inf"))
        return (1 - self.own) * similarity.softmax(1) + self.own * itself.to(models.dtype)
