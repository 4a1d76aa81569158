"""FedIter-HT: iterative hard thresholding on every client and on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.hard_threshold import HardThreshold, paper_presets
from parsifl.core.algorithm import ClientUpdate, Preset
from parsifl.core.batching import ClientRoundData
from parsifl.core.problem import Params, Problem
from parsifl.solvers.thresholding import SparseParams, threshold


@final
@dataclass(frozen=True)
class FedIterHT(HardThreshold):
    r"""Clients threshold after each of K SGD steps, and the server thresholds the mean.

    .. math:: x_i \leftarrow \mathcal{H}_\tau(x_i - \gamma g_i(x_i)) \quad (K \text{ times}), \qquad
              x \leftarrow \mathcal{H}_\tau\left(\sum_i p_i x_i\right)

    with gamma = `lr`, K = `local_steps`, tau = `tau` and p_i by `weighting`. Sent: a sparse
    model, both ways. Kept: nothing.
    """

    cites: ClassVar[str] = (
        "Tong et al., Federated Nonconvex Sparse Learning (Fed-HT and FedIter-HT), "
        "arXiv:2101.00052, 2020"
    )

    presets: ClassVar[Mapping[str, Preset]] = paper_presets(
        simulations={"lr": 0.001, "local_steps": 10}, mnist={"lr": 1.0, "local_steps": 10}
    )

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, SparseParams]:
        """Run SGD with thresholding from the sparse model."""
        batches, config = data["train"], self.sgd(data.round)
        return ClientUpdate(None, threshold(problem, received, batches, config, self.sparsity))
