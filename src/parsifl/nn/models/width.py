"""HeteroFL's narrow networks: the first ceil(r * C) channels of hidden layers, and its scaler."""

from __future__ import annotations

import math
from typing import final

from torch import Tensor, nn

from parsifl.core.errors import ConfigError
from parsifl.nn.layer_groups import find_head


def scaled(channels: int, width: float) -> int:
    """Return ceil(width * channels), at least one.

    >>> scaled(64, 0.5), scaled(10, 0.25), scaled(7, 1.0)
    (32, 3, 7)
    """
    if not 0.0 < width <= 1.0:
        raise ConfigError(f"width is {width}; it must be above 0 and at most 1")
    if channels < 1:
        raise ConfigError(f"a layer has {channels} units, but every layer needs at least one")
    # 0.1 * 30 is 3.0000000000000004 in floating point: rounding first keeps 3 channels
    return max(1, math.ceil(round(width * channels, 9)))


@final
class Scaler:
    """A forward hook that divides the output of a layer by the width, in training only.

    A layer with a fraction r of its inputs sums a fraction r of the terms. Dividing by r in
    training restores the scale of the activations in the full network, of which the layer is a
    corner. At test time nothing is scaled.
    """

    def __init__(self, width: float) -> None:
        self.width = width

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Scale one output."""
        del inputs  # part of the signature of a hook
        return output / self.width if layer.training else output


def add_scalers(module: nn.Module, width: float, head: str | None = None) -> None:
    """Add a scaler after every layer with a weight matrix, except the head.

    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))
    >>> add_scalers(net, 0.5)
    >>> len(net[0]._forward_hooks), len(net[1]._forward_hooks)
    (1, 0)
    """
    last = find_head(module, head)
    hook = Scaler(width)
    for name, layer in module.named_modules():
        weighted = any(value.ndim > 1 for value in layer.parameters(recurse=False))
        if weighted and name != last and not name.startswith(f"{last}."):
            layer.register_forward_hook(hook)
