"""Settings of composite optimization: an l1 or a hard-thresholding proximal operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from parsifl.core.config import NonNegative, Positive
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.constraint import Sparsity, kept_places
from parsifl.solvers.thresholding import shrunk


@dataclass(frozen=True)
class ProximalSettings:
    """Settings of a proximal operator.

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
        Read all rows of the client in every step; `batch_size` is then ignored.
    """

    prox: Literal["l1", "hard"] = "l1"
    lam: NonNegative = 1e-3
    server_lr: Positive = 1.0
    full_batch: bool = False

    def apply_prox(
        self, problem: Problem, params: Params, step: float | Tensor, sparsity: Sparsity
    ) -> Params:
        """Apply the proximal operator of step * psi."""
        if self.prox == "hard":
            return sparsity.project(problem, params)
        always = kept_places(problem)
        return {
            name: shrunk(value, self.lam * step, always.get(name, ()))
            for name, value in params.items()
        }
