"""Losses of networks: two by name, PyTorch's loss modules, and functions.

A loss gives one number per row, so that padded rows and clients of a batch can be weighted. The
mean over a batch is that of PyTorch: class weights and ignored labels also count in its
denominator.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from parsifl.core._functorch import is_transformed
from parsifl.core.errors import ConfigError, DataError, reason

Loss = Literal["cross-entropy", "mse"]
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs and targets; returns one number per row, or the mean of the rows."""

_OF_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_NAMES = "'cross-entropy', 'mse', a loss module such as torch.nn.HuberLoss(), or a function"


def row_loss(kind: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each row."""
    if kind == "cross-entropy" and output.ndim == 2 and y.ndim == 1 and is_transformed():
        # the other form takes a third longer under vmap
        return -functional.log_softmax(output, -1).gather(1, y.unsqueeze(1)).squeeze(1)
    if kind == "cross-entropy":
        return functional.cross_entropy(output, y, reduction="none")
    return (output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(-1)


@final
@dataclass(frozen=True)
class RowLoss:
    """A loss with one number per row.

    Attributes
    ----------
    name
        Identifies the loss in the configuration of a run.
    kind
        The loss by name, which the fused solver supports; None for others.
    of_labels
        Whether targets are class labels, so that the accuracy is recorded.
    function
        Returns the losses of rows, or their mean.
    share
        Returns how much each row counts in the mean of a batch. Default: all rows equally.
    """

    name: str
    kind: Loss | None
    of_labels: bool
    function: LossFunction
    share: Callable[[Tensor], Tensor] | None = None

    def rows(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each row [n]."""
        losses = self.function(output, y)
        if not isinstance(losses, Tensor):
            raise DataError(
                f"the loss {self.name} must return a tensor, got a {type(losses).__name__}: "
                "compute it with torch, without float() or .item()"
            )
        if losses.ndim == 0 and len(y) != 1:  # a mean: that of each row alone is its loss
            losses = torch.func.vmap(lambda o, t: self.function(o[None], t[None]))(output, y)
        if losses.ndim == 0:
            return losses[None]
        if losses.shape[0] != len(y):
            raise DataError(
                f"the loss {self.name} must return one number per row, a tensor of shape "
                f"{[len(y)]}, or their mean; got shape {list(losses.shape)}"
            )
        return losses if losses.ndim == 1 else losses.reshape(len(y), -1).mean(-1)

    def mean(self, output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the mean over a batch whose rows have these weights."""
        losses = self.rows(output, y)
        weight = weight.to(losses.dtype)
        if self.share is not None:
            total = (weight * self.share(y).to(losses)).sum()
            return losses.dot(weight) / total.clamp(min=torch.finfo(losses.dtype).tiny)
        # normalise the weights first: autograd then records one step instead of three
        return losses.dot(weight / weight.sum().clamp(min=1))

    def check(self, output: Tensor, y: Tensor) -> None:
        """Raise DataError if the loss cannot be computed from these outputs and targets."""
        try:
            with torch.enable_grad():
                losses = self.rows(output.detach().requires_grad_(), y)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the loss {self.name} fails for outputs of shape {list(output.shape)} and targets "
                f"of shape {list(y.shape)} and {y.dtype}: {reason(error)}"
            ) from error
        if not losses.dtype.is_floating_point:
            raise DataError(f"the loss {self.name} must return real numbers, got {losses.dtype}")
        if not losses.requires_grad:
            raise DataError(
                f"the loss {self.name} has no gradient with respect to the outputs: compute it "
                "from them with differentiable operations, without argmax, comparisons or .detach()"
            )


def loss_of(loss: Loss | nn.Module | LossFunction, dtype: torch.dtype = torch.float32) -> RowLoss:
    """Return a loss with one number per row, for outputs of this dtype.

    >>> loss_of(nn.HuberLoss(delta=2.0)).rows(torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]))
    tensor([0.5000, 0.0000])
    """
    if loss in ("cross-entropy", "mse"):
        kind: Loss = loss
        return RowLoss(repr(kind), kind, kind == "cross-entropy", lambda o, y: row_loss(kind, o, y))
    if isinstance(loss, type | str) or not callable(loss):
        shown = f"the class {loss.__name__}" if isinstance(loss, type) else f"{loss!r:.80}"
        raise ConfigError(f"loss must be {_NAMES}, got {shown}")
    if isinstance(loss, nn.Module):
        return _of_module(loss, dtype)
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', repr(loss))}"
    return RowLoss(name, None, False, loss)


def _of_module(loss: nn.Module, dtype: torch.dtype) -> RowLoss:
    """Return a loss module without its reduction over rows."""
    reduction = getattr(loss, "reduction", None)
    if reduction == "sum":
        raise ConfigError(
            "loss has reduction='sum', so its step would grow with the batch size; "
            "use reduction='mean'"
        )
    if [*loss.parameters()]:
        raise ConfigError(
            f"the loss {type(loss).__name__} has parameters, which no algorithm would train; make "
            "them part of the module"
        )
    # class weights from NumPy are float64, which PyTorch rejects for outputs of float32
    per_row: Any = copy.deepcopy(loss).to(dtype)
    if reduction is not None:
        per_row.reduction = "none"
    constants = b"".join(value.numpy(force=True).tobytes() for value in loss.buffers())
    name = repr(loss) + (f" {zlib.crc32(constants):08x}" if constants else "")
    share = _share(loss) if reduction == "mean" else None
    return RowLoss(name, None, isinstance(loss, _OF_LABELS), _on_any_device(per_row), share)


def _on_any_device(module: nn.Module) -> LossFunction:
    """Return a loss whose class weights are on the device of the outputs."""
    copies: dict[torch.device, nn.Module] = {}

    def function(output: Tensor, y: Tensor) -> Tensor:
        if output.device not in copies:
            copies[output.device] = copy.deepcopy(module).to(output.device)
        losses: Tensor = copies[output.device](output, y)
        return losses

    return function


def _share(loss: Any) -> Callable[[Tensor], Tensor] | None:
    """Return how much labels count in the mean of PyTorch's cross-entropy."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return None
    weight, ignored = loss.weight, loss.ignore_index
    if weight is None and ignored < 0:  # labels are never negative
        return None

    def share(y: Tensor) -> Tensor:
        if y.is_floating_point():  # probabilities: PyTorch divides by the rows
            return y.new_ones(len(y))
        known = y != ignored
        each = known.to(torch.float64)
        if weight is not None:
            each = each * weight.to(y.device, torch.float64)[torch.where(known, y, 0)]
        return each.reshape(len(y), -1).mean(-1)

    return share
