"""Local: no federation, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import AdditiveAlgorithm, ClientInfo, ClientUpdate
from parsifl.core.batching import ClientRoundData
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd


@final
@dataclass(frozen=True)
class Local(LocalSgd, AdditiveAlgorithm[Problem, None, Params, None, None, None]):
    r"""Every client trains on its own data.

    .. math:: v_i \leftarrow v_i - \eta g_i(v_i)

    with eta = `lr`. All clients start from the same initial parameters. Sent: nothing. Kept:
    v_i on the client.
    """

    cites: ClassVar[str] = "The baseline without federation"
    supports_buffers: ClassVar[bool] = True
    keeps_buffers_local: ClassVar[bool] = True

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> None:
        """Keep nothing on the server."""

    def broadcast(self, problem: Problem, server: None, client: ClientInfo, key: Key) -> None:
        """Send nothing."""

    def init_client(self, problem: Problem, client: ClientInfo, received: None, key: Key) -> Params:
        """Return the problem's initial parameters."""
        return problem.init(key)

    def client_update(
        self, problem: Problem, received: None, state: Params, data: ClientRoundData
    ) -> ClientUpdate[Params, None]:
        """Continue SGD on the personal model."""
        return ClientUpdate(sgd(problem, state, data["train"], self.sgd(data.round)), None)

    def personalize(
        self, problem: Problem, received: None, state: Params, data: ClientRoundData
    ) -> Model:
        """Evaluate every client on its own model."""
        return Model(problem, state)

    def contribute(self, problem: Problem, upload: None, weight: float) -> None:
        """Add nothing."""

    def aggregate(self, problem: Problem, server: None, total: None, key: Key) -> None:
        """Keep nothing."""
