"""Split-Mix: several narrow networks, of which a device trains as many as it can afford."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from parsifl.algorithms._bases.submodel import (
    SubmodelAveraging,
    SubmodelServer,
    SubmodelSpec,
    members_for,
)
from parsifl.core.algorithm import ClientInfo, Conformance
from parsifl.core.config import Count
from parsifl.core.keys import Key
from parsifl.core.problem import Scalable


@final
@dataclass(frozen=True)
class SplitMix(SubmodelAveraging):
    r"""k base networks of width 1/k are trained separately and averaged in prediction.

    .. math:: w^b_i \leftarrow w^b_i - \eta \nabla f_i(w^b_i) \quad (b \in B_i), \qquad
              w^b \leftarrow \frac{\sum_{i: b \in B_i} p_i w^b_i}{\sum_{i: b \in B_i} p_i},
              \qquad \hat y(x) = \frac{1}{k} \sum_b h(w^b, x)

    with k = `bases`, eta = `lr` and p_i by `weighting`. B_i are max(1, floor(r_i k)) networks,
    assigned cyclically in an order that is shuffled every round; r_i is the "width" of the
    device's profile (1 if there is none). A base network starts as a corner of a full one, and
    in training divides the outputs of its hidden layers by 1/k. A device is evaluated on all base
    networks. Sent down: all base networks, which together have about 1/k of the parameters of the
    full one; up: those that were trained. Kept: nothing.

    Parameters
    ----------
    bases
        k, the number of base networks.
    """

    cites: ClassVar[str] = (
        "Hong et al., Efficient Split-Mix Federated Learning for On-Demand and In-Situ "
        "Customization, ICLR 2022"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Scalable,)
    conformance: ClassVar[Conformance] = Conformance({"bases": 2})

    bases: Count = 8

    def profile_fields(self) -> tuple[str, ...]:
        """Return the entry with the width of a device."""
        return ("width", *super().profile_fields())

    def networks(self) -> int:
        """Return k."""
        return self.bases

    def submodel(self, server: SubmodelServer, client: ClientInfo, key: Key) -> SubmodelSpec:
        """Assign this round's networks."""
        return SubmodelSpec(1 / self.bases, members_for(client, self.bases, key))
