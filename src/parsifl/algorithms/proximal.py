"""What the proximal baselines share: an l1 or a hard-thresholding proximal operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from parsifl.algorithms.settings import LocalSGD
from parsifl.atoms.sparsity import Sparsity, kept_places
from parsifl.config import NonNegative, Positive
from parsifl.problem import Params, Problem
from parsifl.solvers.thresholding import soft


@dataclass(frozen=True)
class Proximal(Sparsity, LocalSGD):
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
    """

    prox: Literal["l1", "hard"] = "l1"
    lam: NonNegative = 1e-3
    server_lr: Positive = 1.0

    def proximal(self, problem: Problem, params: Params, step: float | Tensor) -> Params:
        """Apply the proximal operator of step * psi."""
        if self.prox == "hard":
            return self.project(problem, params)
        always = kept_places(problem)
        return {
            name: soft(value, self.lam * step, always.get(name, ()))
            for name, value in params.items()
        }
