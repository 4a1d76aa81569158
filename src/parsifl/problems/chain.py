"""Recognises modules that are a plain chain of layers, which the fused solver can run by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional

Activation = Literal["relu", "tanh", "sigmoid"]


@dataclass(frozen=True)
class Linear:
    """An affine layer, by the names of its parameters (bias may be missing)."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Activate:
    """An elementwise activation."""

    function: Activation


@dataclass(frozen=True)
class Flatten:
    """Everything behind the batch axis becomes one axis."""


Layer = Linear | Activate | Flatten
Chain = tuple[Layer, ...]

_ACTIVATIONS: dict[Any, Activation] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    functional.relu: "relu",
    torch.relu: "relu",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    "relu": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


def find_chain(module: nn.Module) -> Chain | None:
    """Return the module as a chain of known layers; None if it is anything else.

    >>> find_chain(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    (Linear(weight='0.weight', bias='0.bias'), Activate(function='relu'))
    """
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:  # tracing runs the user's code on symbols: whatever it raises means "no"
        return None
    layers: list[Layer] = []
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and previous is None:
            previous = node
        elif node.op == "output":
            return tuple(layers) if node.args == (previous,) else None
        else:
            if not node.args or node.args[0] is not previous or node.kwargs.get("inplace"):
                return None
            layer = _layer(node, module)
            if layer is None:
                return None
            layers += layer
            previous = node
    return None


def _layer(node: fx.Node, module: nn.Module) -> list[Layer] | None:
    """Translate one node; an empty list for the identity, None for what is not known."""
    if node.op == "call_module":
        return _module_layer(str(node.target), module.get_submodule(str(node.target)))
    if node.op in ("call_function", "call_method"):
        if node.target in (torch.flatten, "flatten") and node.args[1:] == (1,):
            return [Flatten()]
        if node.target in _ACTIVATIONS and len(node.args) == 1:
            return [Activate(_ACTIVATIONS[node.target])]
    return None


def _module_layer(name: str, layer: nn.Module) -> list[Layer] | None:
    if type(layer) is nn.Linear:
        return [Linear(f"{name}.weight", f"{name}.bias" if layer.bias is not None else None)]
    if type(layer) in _ACTIVATIONS:
        return [Activate(_ACTIVATIONS[type(layer)])]
    if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return [Flatten()]
    return [] if type(layer) is nn.Identity else None
