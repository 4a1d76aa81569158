"""Fed-HT: local SGD, then a mean that keeps its largest coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.hard_threshold import Thresholded
from parsifl.core.algorithm import ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.problem import Params, Problem
from parsifl.solvers.thresholding import SparseParams, descend


@final
@dataclass(frozen=True)
class FedHT(Thresholded):
    r"""Every client takes K SGD steps; the server thresholds the mean.

    .. math:: x_i \leftarrow x_i - \gamma g_i(x_i) \quad (K \text{ times}), \qquad
              x \leftarrow \mathcal{H}_\tau\left(\sum_i p_i x_i\right)

    with gamma = `lr`, K = `steps`, tau = `tau` and p_i by `weighting`. Sent: down a sparse model,
    up a dense one (over a CSR design only the columns that occur in the client's rows).
    """

    cites: ClassVar[str] = (
        "Tong et al., Federated Nonconvex Sparse Learning (Fed-HT and FedIter-HT), 2022"
    )

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, SparseParams]:
        """Run plain SGD from the sparse model."""
        return ClientUpdate(None, descend(problem, received, data["train"], self.pace(data)))
