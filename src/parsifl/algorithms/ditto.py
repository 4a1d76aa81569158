"""Ditto: a global model, and personal models held near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from parsifl import tree
from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import MeanServer
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import NonNegative
from parsifl.keys import Key
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.rules import Affine
from parsifl.solvers.sgd import sgd
from parsifl.work import Draw, Shard, Work


@final
@dataclass(frozen=True)
class Ditto(LocalSGD, MeanServer[Problem, Params]):
    r"""FedAvg for the global model, and beside it one regularised personal model a client.

    .. math:: v_i \leftarrow v_i - \eta \left(g_i(v_i) + \lambda (v_i - w)\right)

    with eta = `lr` and lambda = `lam`, where w is the model received in this round. Sent: the
    global model, both ways. Kept: the personal model v_i on the client.

    Parameters
    ----------
    lam
        Strength of the pull towards the global model.
    personal_epochs
        Epochs of the personal model a round; None: as long as the global model.
    """

    cites: ClassVar[str] = (
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    )

    lam: NonNegative = 0.1
    personal_epochs: NonNegative | None = None

    def init_client(self, problem: Problem, info: ClientInfo, down: Params, key: Key) -> Params:
        """Start from the first model received."""
        return down

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read separate mini-batches for the global and for the personal model."""
        shared = personal = self.draw(info)
        if self.personal_epochs is not None:
            personal = Draw(self.batch, epochs=self.personal_epochs, partial=self.partial)
        return Work({"shared": shared, "personal": personal})

    def local(
        self, problem: Problem, down: Params, client: Params, shard: Shard
    ) -> Local[Params, Params]:
        """Train the global model for the server, then the personal one against what came down."""
        rate = self.rate(shard.round)
        shared = sgd(problem, down, shard["shared"], rate, momentum=self.momentum, decay=self.decay)
        personal = sgd(
            problem,
            client,
            shard["personal"],
            rate,
            rule=Affine(self.lam),
            aux=(tree.scale(-self.lam, down),),
            momentum=self.momentum,
            decay=self.decay,
        )
        return Local(personal, shared)

    def personalize(self, problem: Problem, down: Params, client: Params, shard: Shard) -> Model:
        """Judge every client on its personal model."""
        return Model(problem, client)
