"""Per-FedAvg: a global model that is good after one step on each client's own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from parsifl import tree
from parsifl.algorithm import ClientInfo, Local
from parsifl.algorithms.mean import WeightedMean
from parsifl.algorithms.settings import LocalSGD
from parsifl.config import Count, Positive
from parsifl.errors import ConfigError
from parsifl.problem import Model, Params, Problem
from parsifl.solvers.lookahead import part, sgd_ahead, shifted, slope, step_
from parsifl.solvers.sgd import owned, sgd
from parsifl.work import Batch, Draw, Partial, Shard, Work


@final
@dataclass(frozen=True)
class PerFedAvg(LocalSGD, WeightedMean[Problem]):
    r"""Local meta-learning steps, then a mean; each client adapts the result to itself.

    .. math:: w_i' = w_i - \alpha g_i(w_i; D), \qquad
              v = g_i(w_i'; D'), \qquad
              w_i \leftarrow w_i - \eta \left(v - \alpha
                  \frac{g_i(w_i + \delta v; D'') - g_i(w_i - \delta v; D'')}{2 \delta}\right)

    with eta = `lr`, alpha = `adapt_lr` and delta = `delta`; the first-order variant leaves the
    difference out. D, D', D'' are disjoint parts of one draw of the client's training rows, each
    of `batch` rows. Sent: the model, both ways. Kept: nothing.

    Parameters
    ----------
    variant
        "first-order" or "hessian-free".
    adapt_lr, adapt_steps
        Step size of the adaptation, and how many such steps on training rows make the personal
        model.
    delta
        Half the width of the difference that stands for a Hessian-vector product.
    """

    cites: ClassVar[str] = (
        "Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A "
        "Model-Agnostic Meta-Learning Approach, NeurIPS 2020"
    )

    variant: Literal["first-order", "hessian-free"] = "first-order"
    adapt_lr: Positive = 0.05
    adapt_steps: Count = 1
    delta: Positive = 1e-3
    partial: Partial = "wrap"

    def check(self) -> None:
        """Refuse settings under which a part of a draw would be empty or without meaning."""
        if self.partial == "pad":
            raise ConfigError(
                'partial = "pad" would leave D\' empty on small clients: use "wrap" or "drop"'
            )
        if self.momentum:
            raise ConfigError(f"momentum = {self.momentum:g}: Per-FedAvg takes plain steps, set 0")

    def work(self, info: ClientInfo, round: int) -> Work:
        """Read two (or three) mini-batches a step, as parts of a larger one."""
        draw = self.draw(info)
        parts = 2 if self.variant == "first-order" else 3
        return Work({"train": Draw(parts * self.batch, draw.steps, draw.epochs, draw.partial)})

    def tuning(self, info: ClientInfo) -> Work:
        """Read training rows to adapt on."""
        return Work({"adapt": Draw(self.batch, steps=self.adapt_steps, partial="wrap")})

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Take meta-learning steps from the received model."""
        rate, batches = self.rate(shard.round), shard["train"]
        if self.variant == "first-order":
            trained = sgd_ahead(problem, down, batches, rate, self.adapt_lr, self.decay)
            return Local(None, trained)
        if len(batches) == 0:
            return Local(None, dict(down))
        params = owned(down, batches)
        for batch in batches:
            step_(params, self._direction(problem, params, batch), rate, batch, batches.ragged)
        return Local(None, params)

    def personalize(self, problem: Problem, down: Params, client: None, shard: Shard) -> Model:
        """Judge every client on the model that it has adapted to its training rows."""
        adapted = sgd(problem, down, shard["adapt"], self.adapt_lr, decay=self.decay)
        return Model(problem, adapted)

    def _direction(self, problem: Problem, params: Params, batch: Batch) -> Params:
        first, second, third = (part(batch, number, 3) for number in range(3))
        adapted = shifted(params, -self.adapt_lr, slope(problem, params, first, self.decay))
        direction = slope(problem, adapted, second, self.decay)
        ahead = slope(problem, shifted(params, self.delta, direction), third, self.decay)
        behind = slope(problem, shifted(params, -self.delta, direction), third, self.decay)
        factor = -self.adapt_lr / (2 * self.delta)
        return shifted(direction, factor, tree.subtract(ahead, behind))
