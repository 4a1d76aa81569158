"""What the proximal baselines share: an l1 or a hard-thresholding proximal operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import BatchSpec
from parsifl.core.config import NonNegative, Positive
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.constraint import Sparsity, kept_places
from parsifl.solvers.thresholding import shrunk


@dataclass(frozen=True)
class Proximal(Sparsity, LocalSgd):
    """Settings of a method with a proximal operator.

    Parameters
    ----------
    prox
        "l1" shrinks by `lam` times the step; "hard" keeps the largest coefficients (`tau`,
        `density`, `scope`), as FedGradMP's authors use these baselines.
    lam
        The strength of the l1 norm.
    server_lr
        The server's step size.
    full_batch
        Every step reads all rows of the client, whatever `batch` says.
    """

    prox: Literal["l1", "hard"] = "l1"
    lam: NonNegative = 1e-3
    server_lr: Positive = 1.0
    full_batch: bool = False

    def draw(self, info: ClientInfo) -> BatchSpec:
        """Return the mini-batches of a round, or full batches."""
        drawn = super().batch_spec(info)
        return replace(drawn, batch_size=None) if self.full_batch else drawn

    def proximal(self, problem: Problem, params: Params, step: float | Tensor) -> Params:
        """Apply the proximal operator of step * psi."""
        if self.prox == "hard":
            return self.project(problem, params)
        always = kept_places(problem)
        return {
            name: shrunk(value, self.lam * step, always.get(name, ()))
            for name, value in params.items()
        }
