"""Algorithms whose server averages and keeps the largest coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parsifl.algorithms._bases.averaging import Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.algorithms._bases.sparsity import SparsitySettings
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, Preset
from parsifl.core.batching import ClientRoundData, DataRequest
from parsifl.core.config import Positive
from parsifl.core.keys import Key
from parsifl.core.leaves import Sparse
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.thresholding import SparseParams

_MOST = 1e12
"""Largest factor by which a batch grows."""


def paper_presets(
    simulations: Mapping[str, float], mnist: Mapping[str, float]
) -> dict[str, Preset]:
    """Return the settings of the paper with steps of its grid, chosen from our runs."""
    common = {"weighting": "uniform", "last_batch": "redraw"}
    source = "Section V; lr and K are points of its grid, chosen from our runs"
    return {
        "paper:simulations": Preset(
            {"tau": 200, **common, **simulations},
            source,
            "100 clients, participation 1, 100 rounds (simulation II: 200), glm",
        ),
        "paper:mnist": Preset(
            {"tau": 500, "scope": "row", **common, **mnist},
            source,
            "100 clients, participation 1, glm:datafit=softmax",
        ),
    }


@dataclass(frozen=True)
class HardThreshold(
    SparsitySettings,
    LocalSgd,
    Weighted,
    AdditiveAlgorithm[Problem, Params, None, Params, SparseParams, Mean],
):
    """Abstract base: the server thresholds the mean, w <- H_tau(sum_i p_i w_i).

    Parameters
    ----------
    full_batch
        Read all rows of the client in every step; `batch_size` is then ignored.
    batch_growth
        Factor by which the batch grows per round (1 / omega in the theory), up to all rows.
    """

    full_batch: bool = False
    batch_growth: Positive = 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Return the initial parameters, thresholded."""
        return self.sparsity.project(problem, problem.init(key))

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the sparse model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the sparse model."""
        return Model(problem, server)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request mini-batches, which may grow, or full batches."""
        rows: int | None = None
        if not self.full_batch:
            rows = min(self._grown(round), max(client.samples, self.batch_size))
        return DataRequest({"train": replace(self.batch_spec(client), batch_size=rows)})

    def _grown(self, round: int) -> int:
        # beyond this factor the batch has all rows of any client, and powers would overflow
        exponent = round * math.log(self.batch_growth)
        growth = self.batch_growth**round if exponent < math.log(_MOST) else _MOST
        return max(1, math.ceil(self.batch_size * growth))

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on the global model."""
        return Model(problem, received)

    def contribute(self, problem: Problem, upload: SparseParams, weight: float) -> Mean:
        """Weight the uploaded parameters."""
        values = {n: v.value if isinstance(v, Sparse) else v for n, v in upload.items()}
        weights = {name: value.new_tensor(weight) for name, value in values.items()}
        return Mean(tree.Scaled(weight, upload), weights)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Keep the largest coefficients of the mean."""
        return self.sparsity.project(problem, {**server, **total.value()})
