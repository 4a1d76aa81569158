"""What the hard-thresholding methods share: sparse settings, and a thresholded mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parsifl.algorithms._bases.averaging import Mean
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core import tree
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import Positive
from parsifl.core.keys import Key
from parsifl.core.leaves import Sparse
from parsifl.core.problem import Model, Params, Problem
from parsifl.linear.sparsity.constraint import Sparsity
from parsifl.solvers.thresholding import SparseParams, Steps


@dataclass(frozen=True)
class Thresholded(
    Sparsity, LocalSgd, AdditiveAlgorithm[Problem, Params, None, Params, SparseParams, Mean]
):
    """Abstract base: the server averages, keeps the largest coefficients, and sends them.

    Parameters
    ----------
    full_batch
        Every step reads all rows of the client, whatever `batch` says.
    batch_growth
        Factor by which the batch grows from round to round (the theory's 1 / omega), until it
        holds all rows.
    weighting
        Whether clients weigh by rows or equally.
    """

    full_batch: bool = False
    batch_growth: Positive = 1.0
    weighting: Literal["samples", "uniform"] = "samples"

    def weight(self, client: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(client.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the initial parameters, thresholded."""
        return self.project(problem, problem.init(key))

    def broadcast(self, problem: Problem, server: Params, client: ClientInfo, key: Key) -> Params:
        """Send the sparse model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the sparse model."""
        return Model(problem, server)

    def init_client(self, problem: Problem, client: ClientInfo, received: Params, key: Key) -> None:
        """Keep nothing on the client."""
        return None

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Read the mini-batches of local SGD, growing if asked."""
        draw = self.batch_spec(client)
        rows: int | None = None
        if not self.full_batch:
            growth = min(self.batch_growth**round, float(client.samples))
            rows = min(math.ceil(self.batch_size * growth), max(client.samples, self.batch_size))
        return DataRequest({"train": BatchSpec(rows, draw.steps, draw.epochs, draw.last_batch)})

    def pace(self, shard: ClientRoundData) -> Steps:
        """Return how SGD moves in this round."""
        return Steps(self.learning_rate(shard.round), self.momentum, self.weight_decay)

    def personalize(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> Model:
        """Judge every client on the model that it receives."""
        return Model(problem, received)

    def contribute(self, problem: Problem, upload: SparseParams, weight: float) -> Mean:
        """Weigh the uploaded parameters."""
        values = {n: v.value if isinstance(v, Sparse) else v for n, v in upload.items()}
        weights = {name: value.new_tensor(weight) for name, value in values.items()}
        return Mean(tree.Scaled(weight, upload), weights)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Keep the largest coefficients of the mean."""
        return self.project(problem, {**server, **total.value()})
