"""HeteroFL: weak devices train narrow slices of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from parsifl.algorithms._bases.submodel import (
    SubmodelAveraging,
    SubmodelServer,
    SubmodelSpec,
    width_of,
)
from parsifl.core.algorithm import ClientInfo
from parsifl.core.keys import Key
from parsifl.core.problem import Scalable


@final
@dataclass(frozen=True)
class HeteroFL(SubmodelAveraging):
    r"""A device of width r trains the first ceil(r C) channels of every layer.

    .. math:: w_i \leftarrow w_i - \eta \nabla f_i(w_i; r_i), \qquad
              w[e] \leftarrow \frac{\sum_{i \ni e} p_i w_i[e]}{\sum_{i \ni e} p_i}

    with eta = `lr`, p_i by `weighting`, and the sum over the devices whose slice has the entry e;
    an entry that no device has keeps its value. r_i is the "width" of the device's profile (1 if
    there is none). In training a narrow network divides the outputs of its hidden layers by r
    (the scaler of the paper); normalization uses the statistics of the batch, so that only
    parameters are shared. The paper's mask on the logits of classes that a device lacks is
    not implemented. A device is evaluated on its slice, or on the full model (`deploy`).
    Sent: the slice, both ways; the full model down with deploy="full". Kept: nothing.

    Parameters
    ----------
    deploy
        What a device is evaluated on: its "slice", or the "full" model, which it then receives as
        a whole (the papers of HeteroFL and PerFedMask report the full model).
    """

    cites: ClassVar[str] = (
        "Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning for "
        "Heterogeneous Clients, ICLR 2021"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Scalable,)

    deploy: Literal["slice", "full"] = "slice"

    def deploys_full(self) -> bool:
        """Evaluate the full model if `deploy` is "full"."""
        return self.deploy == "full"

    def profile_fields(self) -> tuple[str, ...]:
        """Return the entry with the width of a device."""
        return ("width", *super().profile_fields())

    def slices(self) -> bool:
        """Average slices of unequal size."""
        return True

    def submodel(self, server: SubmodelServer, client: ClientInfo, key: Key) -> SubmodelSpec:
        """Give a device the width of its profile."""
        return SubmodelSpec(width_of(client))
