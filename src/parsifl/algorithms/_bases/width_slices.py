"""Corners of a model for narrow devices, and their mean entry by entry."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parsifl.algorithms._bases.averaging import Mean
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.problem import Layered, Params, Problem, Scalable
from parsifl.masks.instance import is_number

Shapes = Mapping[str, tuple[int, ...]]


def width_of(info: ClientInfo) -> float:
    """Return the width of a device: the fraction of the channels that its profile says, or 1.

    >>> width_of(ClientInfo(0, 10, {"width": 0.5})), width_of(ClientInfo(1, 10))
    (0.5, 1.0)
    """
    width = info.profile.get("width", 1.0)
    if not is_number(width) or not 0 < width <= 1:
        raise ConfigError(
            f"the width of client {info.id} is {width!r}; a width is a number above 0, at most 1"
        )
    return float(width)


def corner(params: Params, shapes: Shapes | None) -> Params:
    """Return the leading slice of every parameter; None: the parameters as they are.

    >>> corner({"w": torch.arange(6).reshape(2, 3)}, {"w": (1, 2)})["w"]
    tensor([[0, 1]])
    """
    if shapes is None:
        return params
    return {name: _corner(value, shapes[name]).clone() for name, value in params.items()}


def _corner(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value[tuple(slice(0, size) for size in shape)]


def padded(upload: Params, weight: float, shapes: Shapes) -> Mean:
    """Return one device's summand in the full shapes: entries that it lacks weigh nothing."""
    total, weights = {}, {}
    for name, value in upload.items():
        total[name], weights[name] = value.new_zeros(shapes[name]), value.new_zeros(shapes[name])
        _corner(total[name], tuple(value.shape)).copy_(value)
        _corner(weights[name], tuple(value.shape)).fill_(weight)
    return Mean(tree.Scaled(weight, total), weights)


def merged(params: Params, total: Mean) -> Params:
    """Replace every entry that some device trained by its weighted mean."""
    return {
        name: torch.where(total.weight[name] > 0, total.total[name] / total.weight[name], value)
        if name in total.total
        else value
        for name, value in params.items()
    }


def narrowed(problem: Problem, width: float) -> Scalable:
    """Return the problem at a fraction of its width."""
    return scalable(problem).narrow(width)


def scalable(problem: Problem) -> Scalable:
    """Return the problem if it has widths."""
    if not isinstance(problem, Scalable):
        raise CapabilityError(f"{type(problem).__name__} is not Scalable: it has one width only")
    return problem


def layered(problem: Problem) -> Layered:
    """Return the problem if it has blocks and a head."""
    if not isinstance(problem, Layered):
        raise CapabilityError(f"{type(problem).__name__} is not Layered: it has no blocks to mask")
    return problem
