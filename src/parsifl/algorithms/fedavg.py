"""FedAvg: local SGD, then a weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.problem import Params, Problem
from parsifl.solvers.sgd import sgd


@final
@dataclass(frozen=True)
class FedAvg(LocalSgd, Averaging[Problem, None]):
    r"""Clients take K SGD steps from the global model, and the server averages the results.

    .. math:: w_i \leftarrow w_i - \eta g_i(w_i) \quad (K \text{ times}), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr`, K = `local_steps` and p_i by `weighting`. Sent: the model, both ways. Kept:
    nothing.
    """

    cites: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )
    supports_buffers: ClassVar[bool] = True

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run SGD from the global model."""
        return ClientUpdate(None, sgd(problem, received, data["train"], self.sgd(data.round)))
