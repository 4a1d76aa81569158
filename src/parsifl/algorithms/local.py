"""Local: no federation at all, the yardstick of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from parsifl.algorithm import Algorithm, ClientInfo
from parsifl.algorithm import Local as Outcome
from parsifl.algorithms.settings import LocalSGD
from parsifl.keys import Key
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.sgd import sgd
from parsifl.work import Shard, Work


@final
@dataclass(frozen=True)
class Local(LocalSGD, Algorithm[Problem, None, Params, None, None, None]):
    r"""Every client trains on its own data alone; nothing is sent.

    .. math:: v_i \leftarrow v_i - \eta g_i(v_i)

    with eta = `lr`. All clients start from the same initial parameters. Kept: v_i on the client.
    """

    cites: ClassVar[str] = "The baseline without federation"

    def init_server(self, problem: Problem, clients: Sequence[ClientInfo], key: Key) -> None:
        """Keep nothing on the server."""
        return None

    def broadcast(self, problem: Problem, server: None, info: ClientInfo, key: Key) -> None:
        """Send nothing."""
        return None

    def init_client(self, problem: Problem, info: ClientInfo, down: None, key: Key) -> Params:
        """Start from the problem's initial parameters."""
        return problem.init(key)

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read the mini-batches of local SGD."""
        return Work({"train": self.draw(info)})

    def local(
        self, problem: Problem, down: None, client: Params, shard: Shard
    ) -> Outcome[Params, None]:
        """Go on with SGD."""
        trained = sgd(
            problem,
            client,
            shard["train"],
            self.rate(shard.round),
            momentum=self.momentum,
            decay=self.decay,
        )
        return Outcome(trained, None)

    def personalize(self, problem: Problem, down: None, client: Params, shard: Shard) -> Model:
        """Judge every client on its own model."""
        return Model(problem, client)

    def contribute(self, problem: Problem, upload: None, weight: float) -> None:
        """Add nothing."""
        return None

    def aggregate(self, problem: Problem, server: None, total: None, key: Key) -> None:
        """Keep nothing."""
        return None
