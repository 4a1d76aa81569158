"""What a method may ask of a problem: a base and its capabilities, as protocols.

A problem is a model and a loss, never data. Server and clients both have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from parsifl.keys import Key
from parsifl.work import Batch, Rows

Params = dict[str, Tensor]


@runtime_checkable
class Problem(Protocol):
    """A model with a loss."""

    @property
    def score(self) -> str:
        """The row metric that is reported first ("accuracy", "mse", ...)."""
        ...

    @property
    def maximize(self) -> bool:
        """Whether a larger score is better."""
        ...

    @property
    def batchable(self) -> bool:
        """Whether many clients may run at once under `torch.func.vmap`."""
        ...

    @property
    def rows_interact(self) -> bool:
        """Whether predictions depend on the rest of the batch: then padding is not exact."""
        ...

    def init(self, key: Key) -> Params:
        """Return the initial parameters; they depend on the seed alone, not on round or client."""
        ...

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the training loss of a batch: sum(weight * l) / sum(weight), a scalar."""
        ...

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the model's output for each row (logits, or the regression value)."""
        ...

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return metrics with one value a row [n]; their weighted means are what is reported."""
        ...


@dataclass(frozen=True)
class Model:
    """Parameters together with the problem that reads them."""

    problem: Problem
    params: Params


@runtime_checkable
class Layered(Problem, Protocol):
    """A model made of blocks (a weight with its bias and norm), one of which is the head."""

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the parameters of the last layer."""
        ...

    @property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """The parameters of each block, in forward order, head included."""
        ...


@runtime_checkable
class Scalable(Problem, Protocol):
    """A model that exists in several widths, a narrower one being a corner of the full one."""

    def narrow(self, width: float) -> Problem:
        """Return the problem at a fraction of the full width."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        ...


@runtime_checkable
class SupportSolvable(Problem, Protocol):
    """A problem in one coefficient vector that can be minimised over a given support."""

    def gradient(self, params: Params, rows: Rows, weight: Tensor) -> Params:
        """Return the gradient of the weighted mean loss over the rows."""
        ...

    def minimize(self, params: Params, rows: Rows, index: Tensor, valid: Tensor) -> Params:
        """Minimise the full local loss over the coefficients `index[k]` that are `valid[k]`.

        Where the minimiser is not unique, the one nearest to `params` is taken.
        """
        ...
