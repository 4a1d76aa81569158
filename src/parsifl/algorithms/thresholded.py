"""What the hard-thresholding methods share: sparse settings, and a thresholded mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parsifl import tree
from parsifl.algorithm import Algorithm, ClientInfo
from parsifl.algorithms.mean import Mean
from parsifl.algorithms.settings import LocalSGD
from parsifl.atoms.sparsity import Sparsity
from parsifl.config import Positive
from parsifl.keys import Key
from parsifl.messages import Sparse
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.thresholding import SparseParams, Steps
from parsifl.work import Draw, Shard, Work


@dataclass(frozen=True)
class Thresholded(Sparsity, LocalSGD, Algorithm[Problem, Params, None, Params, SparseParams, Mean]):
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

    def weight(self, info: ClientInfo) -> float:
        """Weigh by training rows or equally."""
        return float(info.samples) if self.weighting == "samples" else 1.0

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> Params:
        """Start from the initial parameters, thresholded."""
        return self.project(problem, problem.init(key))

    def broadcast(self, problem: Problem, server: Params, info: ClientInfo, key: Key) -> Params:
        """Send the sparse model."""
        return server

    def model(self, problem: Problem, server: Params) -> Model:
        """Return the sparse model."""
        return Model(problem, server)

    def init_client(self, problem: Problem, info: ClientInfo, down: Params, key: Key) -> None:
        """Keep nothing on the client."""
        return None

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD, growing if asked."""
        draw = self.draw(info)
        rows: int | None = None
        if not self.full_batch:
            growth = min(self.batch_growth**round, float(info.samples))
            rows = min(math.ceil(self.batch * growth), max(info.samples, self.batch))
        return Work({"train": Draw(rows, draw.steps, draw.epochs, draw.partial)})

    def pace(self, shard: Shard) -> Steps:
        """Return how SGD moves in this round."""
        return Steps(self.rate(shard.round), self.momentum, self.decay)

    def personalize(self, problem: Problem, down: Params, client: None, shard: Shard) -> Model:
        """Judge every client on the model that it receives."""
        return Model(problem, down)

    def contribute(self, problem: Problem, upload: SparseParams, weight: float) -> Mean:
        """Weigh the uploaded parameters."""
        values = {n: v.value if isinstance(v, Sparse) else v for n, v in upload.items()}
        weights = {name: value.new_tensor(weight) for name, value in values.items()}
        return Mean(tree.Scaled(weight, upload), weights)

    def aggregate(self, problem: Problem, server: Params, total: Mean, key: Key) -> Params:
        """Keep the largest coefficients of the mean."""
        return self.project(problem, {**server, **total.value()})
