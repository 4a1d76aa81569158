"""Distributed-IHT: one gradient step per round, thresholded on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from annotated_types import Ge, Le

from parsifl.algorithms._bases.hard_threshold import HardThreshold, paper_presets
from parsifl.core.algorithm import ClientUpdate, Preset
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Params, Problem
from parsifl.solvers.thresholding import SparseParams, descend


@final
@dataclass(frozen=True)
class DistributedIHT(HardThreshold):
    r"""Iterative hard thresholding with gradients from all clients: Fed-HT with K = 1.

    .. math:: x \leftarrow \mathcal{H}_\tau\left(\sum_i p_i (x - \gamma v_i)\right)

    with gamma = `lr` and tau = `tau`; v_i is a mini-batch gradient (or, with `full_batch`, the
    gradient). Sent: a sparse model down, a dense one up. Kept: nothing.
    """

    cites: ClassVar[str] = (
        "Algorithm 3 of Tong et al., Federated Nonconvex Sparse Learning, 2020; after Patterson, "
        "Eldar and Keidar, Distributed Compressed Sensing, 2014"
    )

    presets: ClassVar[Mapping[str, Preset]] = paper_presets(
        simulations={"lr": 0.03}, mnist={"lr": 1.0}
    )

    equal_steps: ClassVar[bool] = True

    local_steps: Annotated[int, Ge(0), Le(1)] = 1

    def check(self) -> None:
        """Reject epochs, which may be many steps."""
        super().check()
        if self.epochs is not None:
            raise ConfigError(
                f"DistributedIHT takes one step per round, got epochs={self.epochs:g}: remove it, "
                "or use fedht for more steps"
            )

    def client_update(
        self, problem: Problem, received: Params, state: None, data: ClientRoundData
    ) -> ClientUpdate[None, SparseParams]:
        """Take one step."""
        return ClientUpdate(None, descend(problem, received, data["train"], self.sgd(data.round)))
