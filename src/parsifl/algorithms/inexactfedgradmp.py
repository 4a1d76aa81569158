"""Inexact FedGradMP: subproblems are solved approximately, optionally within a ball."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from parsifl.algorithms._bases.matching_pursuit import MatchingPursuit
from parsifl.core.algorithm import Preset
from parsifl.core.config import Count, NonNegative, Positive
from parsifl.core.problem import Restricted, SupportSolvable
from parsifl.linear.sparsity.coordinates import marked
from parsifl.solvers import restricted


@final
@dataclass(frozen=True)
class InexactFedGradMP(MatchingPursuit):
    r"""Algorithm 2: FedGradMP with an inner solver stopped at accuracy delta, for any cohort.

    .. math:: b \approx \arg\min_{\mathrm{span}(A_{\hat\Gamma})} f_i, \quad
              x = \Pi_R(P_\Lambda b), \qquad
              x \leftarrow \Pi_R\left(P_{\Lambda_s} \textstyle\sum_{S_t} p_i x_i\right)

    with delta = `delta` and R = `radius`; the rest as in `FedGradMP`. The paper's sum over all N
    clients is read as one over the cohort, whose p_i add up to 1. Sent: a tau-sparse
    vector, both ways. Kept: nothing.

    Parameters
    ----------
    solver
        "least-squares" (exact; Newton if the loss is not quadratic), "gd", "sgd", "svrg" or
        "newton". All start at the current iterate, and with a dictionary all solve in atoms of unit
        length.
    inner_steps
        Maximum number of steps of the inner solver.
    inner_batch
        Rows per step for "sgd" and "svrg". Rows of unequal weight are drawn in proportion to their
        weight and squared length.
    inner_lr
        Step size of "sgd"; the other solvers choose their own.
    delta
        The inner solver stops when b is known to be within this distance of the minimizer. The
        distance is bounded by the gradient over the least curvature on the support if the loss is
        quadratic, and by the length of the last step otherwise. With a dictionary the distance is
        that of the models x, bounded by the largest singular value of the unit atoms. "sgd" takes
        all its steps.
    radius
        R, the radius of the ball around zero that holds the model x; None: no ball. An intercept
        and the coefficients in GLM(keep=...) are not part of the ball. With the logistic loss it is
        twice the paper's R, whose loss is log(1 + exp(-2 y u)).
    """

    cites: ClassVar[str] = (
        "Jeong, Needell and Qin, Federated Gradient Matching Pursuit, IEEE Transactions on "
        "Information Theory 70(6), 2024"
    )
    presets: ClassVar[Mapping[str, Preset]] = {
        "paper:femnist10": Preset(
            {
                "tau": 90, "scope": "row", "local_steps": 20, "batch_size": 50, "solver": "sgd",
                "inner_steps": 2, "inner_batch": 50, "radius": 1e5,
            },
            "Section V-B; the rate of the inner SGD is not given",
            "300 clients x 100 rows, 10 per round, 1000 rounds, glm:datafit=softmax",
        ),
    }  # fmt: skip

    solver: Literal["least-squares", "gd", "sgd", "svrg", "newton"] = "gd"
    inner_steps: Count = 50
    inner_batch: Count = 10
    inner_lr: Positive = 0.01
    delta: NonNegative = 1e-6
    radius: Positive | None = None

    def solve(self, part: Restricted, key: Tensor) -> Tensor:
        """Minimize approximately."""
        delta = self.delta / part.stretch
        if self.solver == "gd":
            return restricted.gradient_descent(part, delta, self.inner_steps)
        if self.solver == "newton":
            return restricted.newton(part, delta, self.inner_steps)
        if self.solver == "sgd":
            return restricted.stochastic_gradient(
                part, key, self.inner_batch, self.inner_lr, self.inner_steps
            )
        if self.solver == "svrg":
            return restricted.svrg(part, key, self.inner_batch, delta, self.inner_steps)
        return restricted.minimize(part)

    def bound(self, problem: SupportSolvable, coefficients: Tensor, lead: int = 0) -> Tensor:
        """Project the model onto the ball: with a dictionary x, not its coefficients a.

        Coefficients that are exempt from sparsity, such as an intercept, are not part of the ball.
        """
        if self.radius is None:
            return coefficients
        axes = tuple(range(lead, coefficients.ndim))
        always, gram = problem.unpenalized.get(problem.name, ()), problem.gram
        inside = coefficients
        if always:
            unpenalized = marked(always, coefficients.shape[-1])
            inside = torch.where(unpenalized, 0.0, coefficients)
        if gram is None:
            norm = torch.linalg.vector_norm(inside, dim=axes, keepdim=True)
        else:
            inner = (inside * (inside @ gram)).sum(axes, keepdim=True)
            norm = inner.clamp(min=0).sqrt()
        ball: Tensor = inside * (self.radius / norm.clamp(min=self.radius))
        return torch.where(unpenalized, coefficients, ball) if always else ball
