"""FedPer: a shared body, and a personal head per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.layer_sharing import LayerSharing
from parsifl.core.problem import Layered


@final
@dataclass(frozen=True)
class FedPer(LayerSharing):
    r"""Clients train body and head together; only the body is averaged.

    .. math:: (b_i, h_i) \leftarrow (b_i, h_i) - \eta\, g_i(b_i, h_i), \qquad
              b \leftarrow \sum_i p_i b_i

    with eta = `lr` and p_i by `weighting`. Sent: the body, both ways. Kept: the head h_i on the
    client.
    """

    cites: ClassVar[str] = (
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019"
    )

    def shares(self, problem: Layered, name: str) -> bool:
        """Share everything except the head."""
        return name not in problem.head
