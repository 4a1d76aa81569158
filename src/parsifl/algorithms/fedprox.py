"""FedProx: local SGD with a proximal term towards the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.averaging import Averaging
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.batching import ClientRoundData
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

    with eta = `lr` and mu = `mu`. Sent: the model, both ways. Kept: nothing.

    Parameters
    ----------
    mu
        Weight of the proximal term.
    """

    cites: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    supports_buffers: ClassVar[bool] = True

    mu: NonNegative = 1e-4

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, Params]:
        """Run SGD on f_i(w) + (mu/2) |w - w_t|^2."""
        rule, anchor = LinearRule(self.mu), tree.scale(-self.mu, received)
        config = self.sgd(data.round)
        trained = sgd(problem, received, data["train"], config, rule=rule, aux=(anchor,))
        return ClientUpdate(None, trained)
