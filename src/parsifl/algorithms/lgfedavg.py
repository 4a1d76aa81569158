"""LG-FedAvg: a personal representation per client, and a shared head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.layer_sharing import LayerSharing
from parsifl.core.problem import Layered


@final
@dataclass(frozen=True)
class LGFedAvg(LayerSharing):
    r"""Clients train body and head together; only the head is averaged.

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
        """Share only the head."""
        return name in problem.head
