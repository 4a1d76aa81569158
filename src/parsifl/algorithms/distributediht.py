"""Distributed-IHT: one gradient step a round, thresholded on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from annotated_types import Ge, Le

from parsifl.algorithm import Local
from parsifl.algorithms.thresholded import Thresholded
from parsifl.problem import Params, Problem
from parsifl.solvers.thresholding import SparseParams, descend
from parsifl.work import Shard


@final
@dataclass(frozen=True)
class DistributedIHT(Thresholded):
    r"""Iterative hard thresholding with gradients from all clients: Fed-HT with K = 1.

    .. math:: x \leftarrow \mathcal{H}_\tau\left(\sum_i p_i (x - \gamma v_i)\right)

    with gamma = `lr` and tau = `tau`; v_i is a mini-batch gradient (or, with `full_batch`, the
    gradient). Sent: down a sparse model, up a dense one.
    """

    cites: ClassVar[str] = (
        "Algorithm 3 of Tong et al., Federated Nonconvex Sparse Learning, 2022; after Patterson, "
        "Eldar and Keidar, Distributed Compressed Sensing, 2014"
    )

    steps: Annotated[int, Ge(0), Le(1)] = 1

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, SparseParams]:
        """Take one step."""
        return Local(None, descend(problem, down, shard["train"], self.pace(shard)))
