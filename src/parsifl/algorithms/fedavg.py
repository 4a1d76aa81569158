"""FedAvg: local SGD, then a weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.problem import Params, Problem
from parsifl.solvers.sgd import SgdConfig, sgd


@final
@dataclass(frozen=True)
class FedAvg(LocalSgd, Averaging[Problem, None]):
    r"""Every client takes K SGD steps from the global model; the server averages.

    .. math:: w_i \leftarrow w_i - \eta g_i(w_i) \quad (K \text{ times}), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr`, K = `steps` and p_i by `weighting`. Sent: the model, both ways.
    """

    cites: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017"
    )
    supports_buffers: ClassVar[bool] = True

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run plain SGD from the received model."""
        rate = self.learning_rate(data.round)
        trained = sgd(
            problem, received, data["train"], SgdConfig(rate, self.momentum, self.weight_decay)
        )
        return ClientUpdate(None, trained)
