"""Counting floating-point operations, and which parameters get a weight gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

_NOTED: ContextVar[dict[str, int] | None] = ContextVar("parsifl_noted", default=None)
_PREFIX: ContextVar[str] = ContextVar("parsifl_prefix", default="")


def flop_counter() -> FlopCounterMode:
    """Return torch's counter with a backward formula for convolutions that knows about groups.

    torch counts the weight gradient of a depthwise convolution as if every input channel met
    every output channel, which makes MobileNet's backward pass look five times more expensive.
    """
    target: Any = torch.ops.aten.convolution_backward
    return FlopCounterMode(display=False, custom_mapping={target: _convolution_backward})


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
    """Note what a loss is differentiated by, if `noting_trained` listens."""
    noted = _NOTED.get()
    if noted is not None:
        prefix = _PREFIX.get()
        noted |= {prefix + n: value.numel() for n, value in params.items() if value.requires_grad}
