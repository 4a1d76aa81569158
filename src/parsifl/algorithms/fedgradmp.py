"""FedGradMP: gradient matching pursuit on every client, a pruned mean on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from parsifl.algorithms._bases.matching_pursuit import MatchingPursuit
from parsifl.core.algorithm import Preset
from parsifl.core.problem import Restricted
from parsifl.solvers.restricted import minimize


@final
@dataclass(frozen=True)
class FedGradMP(MatchingPursuit):
    r"""Algorithm 1: K iterations of stochastic gradient matching pursuit per client.

    .. math:: \Gamma = \mathrm{approx}_{2\tau}(\nabla g_{i,j}(x)), \quad
              \hat\Gamma = \Gamma \cup \Lambda, \quad
              b = \arg\min_{\mathrm{span}(A_{\hat\Gamma})} f_i, \quad
              \Lambda = \mathrm{approx}_\tau(b), \quad x = P_\Lambda b

    and on the server :math:`x = P_{\Lambda_s} \sum_i p_i x_i` with
    :math:`\Lambda_s = \mathrm{approx}_\tau(\sum_i p_i x_i)`; tau = `tau`, K = `local_steps`.
    The mini-batch (of `batch_size` rows) only selects; the minimization reads all rows of the
    client. Lambda starts as the support of the received model, as the proof requires. If a client
    has fewer rows than coefficients, the minimizer nearest to the current iterate is taken. Losses
    that are not quadratic are minimized by Newton's method. Sent: a tau-sparse vector, both ways.
    Kept: nothing.
    """

    cites: ClassVar[str] = (
        "Jeong, Needell and Qin, Federated Gradient Matching Pursuit, IEEE Transactions on "
        "Information Theory 70(6), 2024"
    )
    presets: ClassVar[Mapping[str, Preset]] = {
        "paper:figure1": Preset(
            {"tau": 10, "batch_size": 40},
            "Section V-A",
            "50 clients x 100 rows, participation 1, glm:datafit=squared-half",
        ),
        "paper:figure10": Preset(
            {"tau": 10, "batch_size": 30},
            "Section V-D; K is varied from 3 to 15 there",
            "50 clients x 100 rows, participation 1, glm:datafit=squared-half",
        ),
    }

    def solve(self, part: Restricted, key: Tensor) -> Tensor:
        """Minimize exactly."""
        return minimize(part)
