"""What a method may ask of a problem: a base and its capabilities, as protocols.

A problem is a model and a loss, never data. Server and clients both have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from parsifl.keys import Key
from parsifl.work import Batch, Batches, Rows

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


@dataclass(frozen=True)
class Selection:
    """Some rows of pooled data by number, not gathered; padding has weight 0."""

    x: Any
    y: Tensor
    rows: Tensor
    weight: Tensor

    @classmethod
    def of(cls, batches: Batches, step: int) -> Selection:
        """Return the rows of one mini-batch."""
        return cls(batches.x, batches.y, batches.index[step], batches.weight[step])


@dataclass(frozen=True)
class Restricted:
    """A local loss as a function of the few coefficients on a support.

    The loss is sum_j weight_j l(u_j, targets_j) + ridge/2 |z|^2 with u = columns z; with classes
    every tensor has a leading class axis, u_jc = columns_c z_c.

    Attributes
    ----------
    columns
        [n, k], or [classes, n, k]; zero where the support has fewer than k coefficients.
    targets, weight
        [n]; the weights of full data sum to 1.
    ridge, start
        Shaped like z: the l2 strength of each coefficient, and the current coefficients.
    loss, slope, curvature
        The function l and its derivatives in u, row by row.
    scale
        The constant curvature of a quadratic loss; None if it is not quadratic.
    """

    columns: Tensor
    targets: Tensor
    weight: Tensor
    ridge: Tensor
    start: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    scale: float | None


@runtime_checkable
class Selective(Problem, Protocol):
    """A problem that exempts some coefficients from sparsity (an intercept, chosen covariates)."""

    @property
    def kept(self) -> Mapping[str, tuple[int, ...]]:
        """For each parameter, the positions along its last axis that are always kept."""
        ...


@runtime_checkable
class SupportSolvable(Selective, Protocol):
    """A problem in one coefficient tensor that can be minimised over a given support."""

    @property
    def name(self) -> str:
        """The name of the coefficient tensor, [d] or [classes, d]."""
        ...

    @property
    def gram(self) -> Tensor | None:
        """The inner products [d, d] of the atoms; None: coordinates, which are orthonormal."""
        ...

    def gradient(self, params: Params, data: Selection) -> Params:
        """Return the gradient of the mean loss over some rows."""
        ...

    def restrict(self, params: Params, data: Selection, index: Tensor, valid: Tensor) -> Restricted:
        """Return the loss over some rows on the support `index` where `valid`, both [.., k]."""
        ...
