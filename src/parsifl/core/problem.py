"""The interface of a problem: a base protocol and optional capabilities.

A problem is a model and a loss, never data. Server and clients both have it. No code depends on the
class of a problem. Algorithms require the protocols below. Engines and solvers read optional
members, each of which has a default:

================================  ==================================================================
`execution`                       how its clients run fastest (`ExecutionHints`)
`layer_chain`                     its layers, for the fused solver (`LayerChain`); None: unknown
`flatten_inputs`                  whether rows are flattened to vectors first; False
`check_data(params, x, y)`        raises `DataError` for data that the model cannot train on
`output_metrics(output, y)`       `metrics` from outputs, so that clients are scored together
`extra_metrics`                   metrics besides those of `metrics` (`core.metrics.Metric`)
`scored(params, rows)`            outputs and targets as these metrics read them
`buffer_names`                    leaves of `params` that the forward pass updates; empty
`local_buffers`                   whether buffers stay on the clients; False
`loss_and_buffers(params, batch)` the loss and the updated buffers; needed if there are buffers
================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from parsifl.core.batching import Batch, Batches, Rows
from parsifl.core.errors import DataError, ParsiflError, reason
from parsifl.core.keys import Key
from parsifl.core.layer_group import LayerGroup

Params = dict[str, Tensor]
L = TypeVar("L")
_NO_NAMES: frozenset[str] = frozenset()
FEW = 2  # rows on which a model is tried: batch statistics need more than one


@runtime_checkable
class Problem(Protocol):
    """A model with a loss."""

    @property
    def primary_metric(self) -> str:
        """The row metric that is reported first ("accuracy", "mse", ...)."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is better."""
        ...

    @property
    def supports_vmap(self) -> bool:
        """Whether many clients may run at once under `torch.func.vmap`."""
        ...

    @property
    def uses_batch_statistics(self) -> bool:
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
        """Return metrics with one value per row [n]; their weighted means are what is reported."""
        ...


@dataclass(frozen=True)
class ExecutionHints:
    """How the clients of a problem run fastest. Hints affect speed, not results.

    Attributes
    ----------
    fused
        Whether the fused solver is faster than vmap, if there is a `layer_chain`.
    per_client_threads
        Whether one thread per client is faster than a batch of clients.
    block_size
        Clients per batch.
    single_threaded
        Whether each operation should stay on one thread because it is too small to split.
    expensive_rows
        Whether a row costs far more than one use of each parameter (convolutions).
    """

    fused: bool = True
    per_client_threads: bool = False
    block_size: int = 10
    single_threaded: bool = False
    expensive_rows: bool = False


@dataclass(frozen=True)
class LayerChain:
    """A model as a plain chain of layers, which the fused solver differentiates by hand.

    Attributes
    ----------
    layers
        Layers of `parsifl.nn.layer_chain`, in forward order; they name their parameters.
    loss
        "cross-entropy" (of int64 labels) or "mse", averaged over the rows by weight.
    """

    layers: tuple[Any, ...]
    loss: Literal["cross-entropy", "mse"]


_DEFAULTS = ExecutionHints()


def execution(problem: Problem) -> ExecutionHints:
    """Return how the clients of a problem run fastest."""
    hints: ExecutionHints = getattr(problem, "execution", _DEFAULTS)
    return hints


def layer_chain(problem: Problem) -> LayerChain | None:
    """Return the layers of a problem, if it declares them."""
    chain: LayerChain | None = getattr(problem, "layer_chain", None)
    return chain


def flatten_inputs(problem: Problem) -> bool:
    """Return whether a problem reads each row as a vector."""
    return bool(getattr(problem, "flatten_inputs", False))


def buffer_names(problem: Problem) -> frozenset[str]:
    """Return the leaves of the parameters that the forward pass updates instead of gradients."""
    names: frozenset[str] = getattr(problem, "buffer_names", _NO_NAMES)
    return names


def local_buffers(problem: Problem) -> bool:
    """Return whether the buffers of a problem stay on the clients."""
    return bool(getattr(problem, "local_buffers", False))


def split_buffers(problem: Problem, params: Mapping[str, L]) -> tuple[dict[str, L], dict[str, L]]:
    """Return the trainable leaves and the buffers."""
    names = buffer_names(problem)
    if not names:
        return dict(params), {}
    trainable = {name: leaf for name, leaf in params.items() if name not in names}
    return trainable, {name: leaf for name, leaf in params.items() if name in names}


@dataclass(frozen=True)
class Model:
    """Parameters together with the problem that reads them."""

    problem: Problem
    params: Params

    def __repr__(self) -> str:
        """Return sizes instead of values."""
        numbers = sum(value.numel() for value in self.params.values())
        return f"Model({self.problem!r}, {len(self.params)} tensors, {numbers:,} numbers)"


@runtime_checkable
class Layered(Problem, Protocol):
    """A model made of blocks (a weight with its bias and norm) and a head."""

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the parameters of the last layer."""
        ...

    @property
    def layer_groups(self) -> Sequence[LayerGroup]:
        """The blocks below the head, in forward order."""
        ...


@runtime_checkable
class Scalable(Problem, Protocol):
    """A model that exists in several widths. A narrower model is a corner of the full one."""

    def narrow(self, width: float, *, scaled: bool = True) -> Scalable:
        """Return the problem at a fraction of the full width.

        With `scaled`, training compensates for the missing channels (HeteroFL's scaler).
        """
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        ...


@dataclass(frozen=True)
class Selection:
    """Rows of pooled data for a block of clients, given as row numbers.

    Attributes
    ----------
    x, y
        The pooled data of all clients.
    rows, weight
        [clients, n]: row numbers, and their weights (0 for padding).
    """

    x: Any
    y: Tensor
    rows: Tensor
    weight: Tensor

    @cached_property
    def targets(self) -> Tensor:
        """The targets of the rows."""
        return self.y[self.rows]

    @cached_property
    def share(self) -> Tensor:
        """The weights as fractions of a client's sum."""
        return self.weight / self.weight.sum(-1, keepdim=True).clamp(min=1)

    @cached_property
    def count(self) -> Tensor:
        """How many rows each client has."""
        return (self.weight > 0).sum(-1)

    @cached_property
    def _kept(self) -> dict[str, Tensor]:
        return {}

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor derived from these rows; it is computed in the first call only."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


@dataclass(frozen=True)
class Restricted:
    """The local losses of a block of clients as functions of few coefficients z on a support.

    A client's loss is sum_j weight_j l(u_j, targets_j) + ridge/2 |z|^2 with u = columns z. Every
    tensor has a leading client axis; with classes, ridge and z have a class axis next, and all
    classes share the columns.

    Attributes
    ----------
    columns
        [clients, n, k]; zero where a support has fewer than k coefficients. With classes
        [clients, n, m], the columns that any class may use.
    targets, weight
        [clients, n]; the weights of all rows of a client sum to 1.
    rows
        [clients]: how many rows come before the padding.
    ridge, start
        [.., k]: the l2 strength of each coefficient, and the current coefficients.
    loss, slope, curvature
        The function l and its derivatives in u, row by row.
    scale
        The constant curvature of a quadratic loss; None if it is not quadratic.
    u
        The predictor at `start`; None if it is not known.
    places
        With classes, which of the m columns belongs to each entry of z [clients, classes, k]; m
        where a support has fewer than k coefficients. None without classes.
    majorizer
        Like `curvature`, of a quadratic that touches the loss and is nowhere below it; None if
        there is none.
    lengths
        [.., k]: the lengths of the atoms. z belongs to atoms of unit length, so that z / lengths
        are the coefficients. None without a dictionary: z are the coefficients.
    stretch
        A bound of |x| / |z| for the model x, the combination of atoms.
    """

    columns: Tensor
    targets: Tensor
    weight: Tensor
    rows: Tensor
    ridge: Tensor
    start: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    scale: float | None
    u: Tensor | None = None
    places: Tensor | None = None
    majorizer: Callable[[Tensor], Tensor] | None = None
    lengths: Tensor | None = None
    stretch: float = 1.0


@runtime_checkable
class HasUnpenalized(Problem, Protocol):
    """A problem that exempts some coefficients from sparsity (an intercept, chosen covariates)."""

    @property
    def unpenalized(self) -> Mapping[str, tuple[int, ...]]:
        """For each parameter, the positions along its last axis that are always kept."""
        ...


@runtime_checkable
class SupportSolvable(HasUnpenalized, Protocol):
    """A problem in one coefficient tensor that can be minimised over a given support.

    The methods take blocks of clients (see `parsifl.core._functorch.eager`): coefficients
    [clients, d] or [clients, classes, d].
    """

    @property
    def name(self) -> str:
        """The name of the coefficient tensor among the parameters."""
        ...

    @property
    def gram(self) -> Tensor | None:
        """The inner products [d, d] of the atoms; None for coordinates, which are orthonormal."""
        ...

    @property
    def quadratic(self) -> bool:
        """Whether the curvature is the same at all coefficients."""
        ...

    @property
    def has_majorizer(self) -> bool:
        """Whether quadratics bound the loss from above (see `Restricted.majorizer`)."""
        ...

    def predictions(self, coefficients: Tensor, data: Selection) -> Tensor:
        """Return the linear predictor u of the selected rows: [clients, n(, classes)]."""
        ...

    def gradients(self, coefficients: Tensor, data: Selection, u: Tensor) -> Tensor:
        """Return the gradients of the mean losses over the selected rows, given u."""
        ...

    def restrict(
        self,
        coefficients: Tensor,
        data: Selection,
        index: Tensor,
        valid: Tensor,
        u: Tensor | None = None,
    ) -> Restricted:
        """Return the losses on the supports `index` where `valid`, both [.., k], in unit atoms.

        The predictor u may be given if the supports contain all non-zero coefficients.
        """
        ...


class CompactSteps(Protocol):
    """Gradients of mini-batches in the few coefficients that they touch."""

    @property
    def positions(self) -> Tensor:
        """The positions of these coefficients along the last axis, ascending."""
        ...

    def gradient(self, coefficients: Tensor, step: int) -> Tensor:
        """Return the gradient of the loss of one mini-batch."""
        ...


@runtime_checkable
class Compactable(SupportSolvable, Protocol):
    """A problem whose SGD on a CSR design can be restricted to the columns that occur."""

    def compact(self, batches: Batches, coefficients: Tensor) -> CompactSteps | None:
        """Return gradients on those columns; None if the design is dense."""
        ...


@runtime_checkable
class HasBuffers(Problem, Protocol):
    """A model with leaves that the forward pass updates, such as running statistics."""

    @property
    def buffer_names(self) -> frozenset[str]:
        """The names of these leaves among the parameters."""
        ...

    def trainable(self, name: str) -> bool:
        """Return whether a leaf is updated by gradients."""
        ...

    def loss_and_buffers(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Return the training loss, and the buffers after the forward pass."""
        ...


@runtime_checkable
class HasModule(Problem, Protocol):
    """A problem whose model is a `torch.nn.Module`."""

    @property
    def module(self) -> nn.Module:
        """The module on `meta`: structure without values."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter and buffer."""
        ...


@dataclass(frozen=True)
class CurvatureSums:
    """Sums over a client's rows at given coefficients; they add up over clients.

    Attributes
    ----------
    rows
        The sum of the rows' weights.
    loss
        The loss.
    gradient, diagonal
        [d]: its gradient, and the diagonal of its Hessian.
    curvature
        The upper triangle of the Hessian on c candidates, row by row: [c (c + 1) / 2].
    """

    rows: Tensor
    loss: Tensor
    gradient: Tensor
    diagonal: Tensor
    curvature: Tensor


@runtime_checkable
class Summable(HasUnpenalized, Protocol):
    """A problem in one coefficient vector whose loss, slope and curvature are sums over rows.

    Parameters that belong to one client (a baseline hazard; optionally an intercept) are profiled
    out on the client: the derivatives returned are those of the profiled loss.
    """

    @property
    def name(self) -> str:
        """The name of the coefficient vector among the parameters."""
        ...

    @property
    def quadratic(self) -> bool:
        """Whether the curvature is the same at all coefficients."""
        ...

    @property
    def intercept(self) -> bool:
        """Whether the last coefficient multiplies 1."""
        ...

    @property
    def ridge(self) -> Tensor:
        """The l2 strength of each coefficient, [d]."""
        ...

    def curvature_sums(
        self, params: Params, rows: Rows, candidates: Tensor, *, own_intercept: bool = False
    ) -> CurvatureSums:
        """Return the sums at `params`, without the l2 term.

        With `own_intercept` the last coefficient is the client's own: it is profiled out, and its
        value in `params` is ignored.
        """
        ...

    def with_own_intercept(self, params: Params, rows: Rows) -> Params:
        """Return the parameters with the intercept that fits these rows best."""
        ...


OFFERED_BY: Mapping[type[Any], str] = {
    Layered: "parsifl.NeuralProblem (--model mlp, vgg, ...)",
    Scalable: "parsifl.NeuralProblem with a factory that takes width (--model mlp, vgg, ...)",
    SupportSolvable: "parsifl.GLM (--model glm)",
    Summable: "parsifl.GLM (--model glm) or parsifl.sites.families.cox.Cox",
}
"""The problems of Parsifl that have a capability, for error messages."""


def try_predict(problem: Problem, params: Params, rows: Any) -> Tensor | Exception:
    """Return the output for these rows, or the exception."""
    try:
        output: Any = problem.predict(params, rows)
    except Exception as error:  # a module may fail in any way
        return error
    if isinstance(output, Tensor):
        return output
    return TypeError(f"it returns a {type(output).__name__} instead of a tensor")


def check_metrics(problem: Problem, params: Params, x: Any, y: Tensor, output: Tensor) -> None:
    """Raise DataError unless the metrics of the first rows can be computed."""
    targets = y[:FEW]
    try:
        problem.metrics(params, Rows(x[:FEW], targets, torch.ones(len(targets)).to(output.dtype)))
    except ParsiflError:  # names its cause, such as a metric of the user
        raise
    except Exception as error:
        raise DataError(
            f"targets of shape {list(y.shape[1:])} and {y.dtype} do not match what the model "
            f"predicts, shape {list(output.shape[1:])} ({reason(error)}); cross-entropy needs "
            "labels, as integers (int64), and mse as many numbers as outputs"
        ) from error


def unreadable(x: Any, error: Exception, expected: str) -> DataError:
    """Return the error for rows that the model cannot read."""
    rows = f"{'' if isinstance(x, Tensor) else 'sparse '}rows of shape {list(x.shape[1:])}"
    return DataError(f"the model cannot read {rows} and {x.dtype} ({reason(error)}); {expected}")
