"""FedBABU: the body is trained and averaged, the head keeps its initial value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from parsifl.algorithms._bases.submodel import SubmodelAveraging, SubmodelServer, SubmodelSpec
from parsifl.core.algorithm import ClientInfo
from parsifl.core.config import NonNegative
from parsifl.core.keys import Key
from parsifl.core.problem import Layered


@final
@dataclass(frozen=True)
class FedBABU(SubmodelAveraging):
    r"""Federated averaging of the body under a fixed random head, then fine-tuning.

    .. math:: w_i \leftarrow w_i - \eta \nabla_w f_i(w_i, \phi_0), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr` and p_i by `weighting`. A device is evaluated on (w, phi) after it
    fine-tuned both on its own rows, for `tune_epochs` at the learning rate of the round. Sent:
    the body, both ways. Kept: the head phi_0, which every device draws from the seed of the run.
    """

    cites: ClassVar[str] = (
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, "
        "ICLR 2022"
    )
    requires: ClassVar[tuple[type[Any], ...]] = (Layered,)
    uniform_uploads: ClassVar[bool] = True

    tune_epochs: NonNegative | None = 5.0

    def freezes_head(self) -> bool:
        """Keep the head frozen."""
        return True

    def submodel(self, server: SubmodelServer, client: ClientInfo, key: Key) -> SubmodelSpec:
        """Let every device train the whole body."""
        return SubmodelSpec()
