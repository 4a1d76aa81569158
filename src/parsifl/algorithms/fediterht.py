"""FedIter-HT: iterative hard thresholding on every client and on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithm import Local
from parsifl.algorithms.thresholded import Thresholded
from parsifl.problem import Params, Problem
from parsifl.solvers.thresholding import SparseParams, threshold
from parsifl.work import Shard


@final
@dataclass(frozen=True)
class FedIterHT(Thresholded):
    r"""Every client thresholds after each of its K steps, and so does the server.

    .. math:: x_i \leftarrow \mathcal{H}_\tau(x_i - \gamma g_i(x_i)) \quad (K \text{ times}), \qquad
              x \leftarrow \mathcal{H}_\tau\left(\sum_i p_i x_i\right)

    with gamma = `lr`, K = `steps`, tau = `tau` and p_i by `weighting`. Sent: a sparse model, both
    ways.
    """

    cites: ClassVar[str] = (
        "Tong et al., Federated Nonconvex Sparse Learning (Fed-HT and FedIter-HT), 2022"
    )

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, SparseParams]:
        """Run SGD with thresholding from the sparse model."""
        return Local(None, threshold(problem, down, shard["train"], self.pace(shard), self))
