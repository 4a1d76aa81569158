"""Count floating-point operations, and find which parameters get a weight gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from parsifl.core._functorch import TorchDispatchMode, inside_backward

_NOTED: ContextVar[dict[str, int] | None] = ContextVar("parsifl_noted", default=None)
_PREFIX: ContextVar[str] = ContextVar("parsifl_prefix", default="")


class _Counting:
    """Counts operations by the formulas of torch's `FlopCounterMode`.

    Separate from the mode below, because torch would wrap it there, and the first call of the
    wrapper imports torch's compiler, which takes as long as the rest of torch.
    """

    forward = backward = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and add its cost."""
        options = kwargs or {}
        with self:  # type: ignore[attr-defined]  # a mode
            result = function.decompose(*args, **options)
        if result is not NotImplemented:
            return result
        result = function(*args, **options)
        formula = _formulas().get(function.overloadpacket)
        if formula is not None:
            spent = int(formula(*args, **options, out_val=result))
            if inside_backward():
                self.backward += spent
            else:
                self.forward += spent
        return result


@final
class OperationCounter(_Counting, TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """Counts floating-point operations of forward and backward passes separately.

    Attributes
    ----------
    forward, backward
        The operations so far.

    >>> with OperationCounter() as counter:
    ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.total
    48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    @property
    def total(self) -> int:
        """The operations of both passes."""
        return self.forward + self.backward


@cache
def _formulas() -> Mapping[Any, Any]:
    """Return torch's formulas, with one that handles groups in the gradients of convolutions.

    torch counts the weight gradient of a depthwise convolution as if every input channel were
    connected to every output channel: MobileNet's backward pass appears five times as expensive.
    """
    target: Any = torch.ops.aten.convolution_backward
    counter = FlopCounterMode(display=False, custom_mapping={target: _convolution_backward})
    return counter.flop_registry


def _convolution_backward(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *rest: Any,
    **_: Any,
) -> int:
    # rest: bias sizes, stride, padding, dilation, transposed, output padding, groups, mask
    transposed, wanted = rest[4], rest[7]
    spatial = (x_shape if transposed else grad_shape)[2:]
    once = 2 * x_shape[0] * math.prod(spatial) * math.prod(weight_shape)
    return once * (int(wanted[0]) + int(wanted[1]))


@contextmanager
def noting_trained() -> Iterator[dict[str, int]]:
    """Collect the sizes of the parameters with respect to which losses are differentiated."""
    noted: dict[str, int] = {}
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


@contextmanager
def named(prefix: str) -> Iterator[None]:
    """Prefix the parameters of one network of several."""
    token = _PREFIX.set(_PREFIX.get() + prefix)
    try:
        yield
    finally:
        _PREFIX.reset(token)


def note_trained(params: Mapping[str, Tensor]) -> None:
    """Record the parameters that a loss is differentiated by, inside `noting_trained`."""
    noted = _NOTED.get()
    if noted is not None:
        prefix = _PREFIX.get()
        noted |= {prefix + n: value.numel() for n, value in params.items() if value.requires_grad}
