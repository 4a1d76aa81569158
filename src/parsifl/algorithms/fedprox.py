"""FedProx: local SGD that is pulled back to the model it started from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import NonNegative
from parsifl.core.problem import Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.solvers.update_rules import LinearRule


@final
@dataclass(frozen=True)
class FedProx(LocalSgd, Averaging[Problem, None]):
    r"""FedAvg with a proximal term towards the global model.

    .. math:: w_i \leftarrow w_i - \eta \left(g_i(w_i) + \mu (w_i - w)\right), \qquad
              w \leftarrow \sum_i p_i w_i

    with eta = `lr` and mu = `mu`. Sent: the model, both ways.
    """

    cites: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    supports_buffers: ClassVar[bool] = True

    mu: NonNegative = 1e-4

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run SGD on f_i(w) + (mu/2) |w - w_t|^2."""
        trained = sgd(
            problem,
            received,
            data["train"],
            self.sgd(data.round),
            rule=LinearRule(self.mu),
            aux=(tree.scale(-self.mu, received),),
        )
        return ClientUpdate(None, trained)
