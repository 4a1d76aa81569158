"""FedAMP: clients with similar models help each other more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.attention import Attention, AttentionServer
from parsifl.core.algorithm import ClientInfo
from parsifl.core.config import NonNegative, Positive
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem


@final
@dataclass(frozen=True)
class FedAMP(Attention):
    r"""Attentive message passing between the clients' models.

    .. math:: u_i = \sum_j \xi_{ij} w_j, \quad
              \xi_{ij} = \tfrac{\alpha}{\sigma} e^{-\|w_i - w_j\|^2 / \sigma} \; (j \ne i), \quad
              \xi_{ii} = 1 - \sum_{j \ne i} \xi_{ij}, \quad
              w_i = \arg\min f_i(w) + \tfrac{\lambda}{2 \alpha} \|w - u_i\|^2

    with alpha = `alpha`, sigma = `sigma`, lambda = `lam`; the minimization is SGD with `lr`.
    Sent: u_i to client i, w_i back. Kept: w_i on the client and, as the algorithm requires, on
    the server. There is no global model.

    Parameters
    ----------
    alpha
        Step size of the message passing. alpha (N - 1) / sigma must be at most 1.
    """

    cites: ClassVar[str] = (
        "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    )

    lam: NonNegative = 1.0
    sigma: Positive = 1e6
    alpha: Positive = 1e4

    def prox(self) -> float:
        """Return lambda / alpha."""
        return self.lam / self.alpha

    def init_server(
        self, problem: Problem, clients: Sequence[ClientInfo], key: Key
    ) -> AttentionServer:
        """Check that every mixture is convex, and return the initial model for every client."""
        most = self.alpha * (len(clients) - 1) / self.sigma
        if most > 1:
            raise ConfigError(
                f"alpha (N - 1) / sigma = {most:g} with N = {len(clients)} clients must be at most "
                "1, or a client's own weight may be negative; lower alpha or raise sigma"
            )
        return super().init_server(problem, clients, key)

    def attention(self, models: Tensor) -> Tensor:
        """Return xi, from the squared distances between the models."""
        # by differences: the Gram matrix would cancel when models are nearly equal
        distance = torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist")
        weights = self.alpha / self.sigma * torch.exp(-distance.square() / self.sigma)
        weights = weights - torch.diag(weights.diagonal())
        return weights + torch.diag(1 - weights.sum(1))
