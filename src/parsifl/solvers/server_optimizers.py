"""Server optimizers, which update the parameters from the clients' mean.

To add one, write it here and list it in `SERVER_OPTIMIZERS`.

References
----------
Reddi et al., Adaptive Federated Optimization, ICLR 2021.
Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from parsifl.core import config, tree
from parsifl.core.config import Momentum, Positive
from parsifl.core.problem import Params
from parsifl.core.registry import Registry


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
class AdaptiveState:
    """The running mean of the change, and an estimate of its square."""

    first: Params
    second: Params


@dataclass(frozen=True)
class _Adaptive(ABC):
    """Abstract base: move by the mean change over the root of an estimate of its square.

    With the change d of a round: m = beta1 m + (1 - beta1) d, v as the subclass says, and
    w = w + lr m / (sqrt(v) + tau), without bias correction.
    """

    lr: Positive = 0.1
    beta1: Momentum = 0.9
    tau: Positive = 1e-3

    def __post_init__(self) -> None:
        config.check(self)

    def init(self, params: Params) -> AdaptiveState:
        """Start with a zero mean."""
        start = self._first_square
        square = tree.map(lambda value: torch.full_like(value, start), params)
        return AdaptiveState(tree.zeros_like(params), square)

    def step(
        self, previous: Params, mean: Params, state: AdaptiveState
    ) -> tuple[Params, AdaptiveState]:
        """Update both moments and move."""
        change = tree.subtract(mean, previous)
        first = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state.first, change)
        second = tree.map(self._next_square, state.second, change)
        moved = tree.map(
            lambda w, m, v: w + self.lr * m / (torch.sqrt(v) + self.tau), previous, first, second
        )
        return moved, AdaptiveState(first, second)

    def state_type(self) -> Any:
        """Return the type of the moments."""
        return AdaptiveState

    @property
    def _first_square(self) -> float:
        """The square before the first round; the paper requires at least tau^2."""
        return self.tau**2

    @abstractmethod
    def _next_square(self, square: Tensor, change: Tensor) -> Tensor: ...


@final
@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam's server step: v = beta2 v + (1 - beta2) d^2, from v = 0.

    Parameters
    ----------
    lr
        Step size.
    beta1, beta2
        Decay of the running means of the change and of its square.
    tau
        Added to the root of the square; a smaller value adapts more.
    """

    beta2: Momentum = 0.99

    @property
    def _first_square(self) -> float:
        return 0.0

    def _next_square(self, square: Tensor, change: Tensor) -> Tensor:
        return self.beta2 * square + (1 - self.beta2) * change * change


@final
@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi's server step: v = v - (1 - beta2) d^2 sign(v - d^2), from v = tau^2.

    Parameters
    ----------
    lr
        Step size.
    beta1
        Decay of the running mean of the change.
    beta2
        1 - beta2 is the speed of the square, which shrinks more slowly than Adam's.
    tau
        Added to the root of the square; a smaller value adapts more.
    """

    beta2: Momentum = 0.99

    def _next_square(self, square: Tensor, change: Tensor) -> Tensor:
        change_square = change * change
        return square - (1 - self.beta2) * change_square * torch.sign(square - change_square)


@final
@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad's server step: v = v + d^2, from v = tau^2; steps become shorter.

    Parameters
    ----------
    lr
        Step size.
    beta1
        Decay of the running mean of the change. Default: 0, as in the paper's experiments.
    tau
        Added to the root of the square; a smaller value adapts more.
    """

    beta1: Momentum = 0.0

    def _next_square(self, square: Tensor, change: Tensor) -> Tensor:
        return square + change * change


@final
@dataclass(frozen=True)
class Sgd:
    """SGD on the change with momentum (FedAvgM); the default settings have no effect.

    Parameters
    ----------
    lr
        Step size.
    momentum
        Heavy-ball momentum: u = momentum u + d, w = w + lr u.
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


SERVER_OPTIMIZERS: Registry[type[ServerOptimizer]] = Registry(
    "server optimizer", {"adagrad": Adagrad, "adam": Adam, "sgd": Sgd, "yogi": Yogi}
)
"""Server optimizers by the name that describes a run, as in "adam:lr=0.05"."""
