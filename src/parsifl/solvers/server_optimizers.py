"""Server optimizers, which update the parameters from the clients' mean.

References
----------
Reddi et al., Adaptive Federated Optimization, ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parsifl.core import config, tree
from parsifl.core.config import Momentum, Positive
from parsifl.core.problem import Params


class ServerOptimizer(Protocol):
    """Updates the server's parameters; `mean - previous` is the negative pseudo-gradient."""

    def init(self, params: Params) -> Any:
        """Return the first state."""
        ...

    def step(self, previous: Params, mean: Params, state: Any) -> tuple[Params, Any]:
        """Return the next parameters and the next state."""
        ...

    def state_type(self) -> Any:
        """Return the type of the state, for reading checkpoints."""
        ...


@dataclass(frozen=True)
class AdamState:
    """Running means of the change and of its square."""

    first: Params
    second: Params


@dataclass(frozen=True)
class Adam:
    """FedAdam's server step, without bias correction, as in the paper.

    Parameters
    ----------
    lr, beta1, beta2, tau
        Step size, decay of both moments, and the degree of adaptivity.
    """

    lr: Positive = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    tau: Positive = 1e-3

    def __post_init__(self) -> None:
        config.check(self)

    def init(self, params: Params) -> AdamState:
        """Start with zero moments."""
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def step(self, previous: Params, mean: Params, state: AdamState) -> tuple[Params, AdamState]:
        """Divide the mean change by the root of its mean square."""
        change = tree.subtract(mean, previous)
        first = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state.first, change)
        second = tree.map(
            lambda v, d: self.beta2 * v + (1 - self.beta2) * d * d, state.second, change
        )
        moved = tree.map(
            lambda w, m, v: w + self.lr * m / (torch.sqrt(v) + self.tau), previous, first, second
        )
        return moved, AdamState(first, second)

    def state_type(self) -> Any:
        """Return the type of the moments."""
        return AdamState


@dataclass(frozen=True)
class Sgd:
    """SGD on the pseudo-gradient; with `lr` = 1 and no momentum it has no effect.

    Parameters
    ----------
    lr, momentum
        Step size, and heavy-ball momentum (FedAvgM).
    """

    lr: Positive = 1.0
    momentum: Momentum = 0.0

    def __post_init__(self) -> None:
        config.check(self)

    def init(self, params: Params) -> Params:
        """Start with zero velocity."""
        return tree.zeros_like(params)

    def step(self, previous: Params, mean: Params, state: Params) -> tuple[Params, Params]:
        """Move by the velocity."""
        velocity = tree.map(lambda v, w, m: self.momentum * v + (m - w), state, previous, mean)
        return tree.axpy(self.lr, velocity, previous), velocity

    def state_type(self) -> Any:
        """Return the type of the velocity."""
        return Params
