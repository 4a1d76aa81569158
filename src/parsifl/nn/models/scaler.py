"""The scaler of HeteroFL: a narrow network that is trained as if it were wide."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from parsifl.nn.layer_groups import find_head


@final
class Scaler:
    """A forward hook that divides the output of a layer by the width, in training only.

    A layer with a fraction r of its inputs sums up a fraction r of the terms. Dividing by r in
    training gives the activations the size that they have in the full network, of which the
    layer is a corner; at test time nothing is scaled.
    """

    def __init__(self, width: float) -> None:
        self.width = width

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Scale one output."""
        del inputs  # part of the signature of a hook
        return output / self.width if layer.training else output


def add_scalers(module: nn.Module, width: float, head: str | None = None) -> None:
    """Put a scaler behind every layer with a weight matrix, except the head.

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
