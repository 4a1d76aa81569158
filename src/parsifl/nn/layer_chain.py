"""Recognise modules that are a plain chain of layers, which the fused solver supports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional

from parsifl.nn.dropout import KeyedDropout
from parsifl.nn.functional import GATE

Activation = Literal["relu", "tanh", "sigmoid"]
Pair = tuple[int, int]
_ACTIVATIONS: dict[Any, Activation] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    functional.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    "relu": "relu",
    "relu_": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
_POOL_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    functional.max_pool2d: nn.MaxPool2d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}


@dataclass(frozen=True)
class Linear:
    """An affine map of the last axis (bias may be missing)."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Conv:
    """A convolution of images, padded with zeros."""

    weight: str
    bias: str | None
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(frozen=True)
class Embed:
    """A row of the weight for each integer; the row `padding` is never trained."""

    weight: str
    padding: int | None


@dataclass(frozen=True)
class GroupNorm:
    """Normalises groups of channels of each row."""

    weight: str | None
    bias: str | None
    groups: int
    eps: float


@dataclass(frozen=True)
class LayerNorm:
    """Normalises the last axes, of this shape."""

    weight: str | None
    bias: str | None
    shape: tuple[int, ...]
    eps: float


@dataclass(frozen=True)
class Pool:
    """The maximum or the mean of a moving window."""

    kind: Literal["max", "mean"]
    kernel: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True)
class AdaptivePool:
    """Means over a grid of this size."""

    size: Pair


@dataclass(frozen=True)
class Dropout:
    """Keyed dropout (see `models.dropout`)."""

    p: float
    salt: int
    channels: bool


@dataclass(frozen=True)
class Activate:
    """An elementwise activation."""

    function: Activation


@dataclass(frozen=True)
class Flatten:
    """Flatten all axes after the batch axis."""


Layer = (
    Linear | Conv | Embed | GroupNorm | LayerNorm | Pool | AdaptivePool | Dropout | Activate
    | Flatten
)  # fmt: skip
Chain = tuple[Layer, ...]


def parameters(layer: Layer) -> tuple[str, ...]:
    """Return the names of a layer's parameters.

    >>> parameters(Linear("0.weight", None))
    ('0.weight',)
    """
    names = (getattr(layer, "weight", None), getattr(layer, "bias", None))
    return tuple(name for name in names if name is not None)


class _Tracer(fx.Tracer):
    """Treats keyed dropout as a layer, without tracing into it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, KeyedDropout) or super().is_leaf_module(m, module_qualified_name)


def find_chain(module: nn.Module) -> Chain | None:
    """Return the module as a chain of supported layers; None if it is not one.

    >>> find_chain(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    (Linear(weight='0.weight', bias='0.bias'), Activate(function='relu'))
    """
    try:
        with GATE.tracing():
            graph = _Tracer().trace(module)
    except Exception:  # tracing runs the user's code on symbols: any exception means "not a chain"
        return None
    layers = _follow(graph, module)
    if layers is None:
        return None
    # each parameter is used once: a layer that is used twice, or never, cannot be part of a chain
    read = sorted(name for layer in layers for name in parameters(layer))
    known = sorted(name for name, _ in module.named_parameters())
    return tuple(layers) if read == known else None


def _follow(graph: fx.Graph, module: nn.Module) -> list[Layer] | None:
    layers: list[Layer] = []
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and previous is None:
            previous = node
        elif node.op == "output":
            return layers if node.args == (previous,) else None
        else:
            next_layers = _layer(node, previous, module)
            if next_layers is None:
                return None
            layers += next_layers
            previous = node
    return None


def _layer(node: fx.Node, previous: fx.Node | None, module: nn.Module) -> list[Layer] | None:
    """Translate one node; an empty list for the identity, None if it is not supported."""
    if not node.args or node.args[0] is not previous:
        return None
    if node.op == "call_module":
        name = str(node.target)
        return _module_layer(name, module.get_submodule(name))
    if node.op not in ("call_function", "call_method"):
        return None
    options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    if node.target in _ACTIVATIONS and len(node.args) == 1 and not options:
        return [Activate(_ACTIVATIONS[node.target])]
    if node.target in (torch.flatten, "flatten"):
        is_plain = (*node.args[1:], *options.items()) in ((1,), (("start_dim", 1),))
        return [Flatten()] if is_plain else None
    maker = _POOL_FUNCTIONS.get(node.target)
    return None if maker is None else _pool_function(maker, node)


def _pool_function(maker: Callable[..., nn.Module], node: fx.Node) -> list[Layer] | None:
    """Convert a call of a pooling function to the module with the same settings."""
    names = [*inspect.signature(maker).parameters]
    settings = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    unread = any(name not in names or isinstance(s, fx.Node) for name, s in settings.items())
    if unread or len(node.args) - 1 > len(names):
        return None
    return _module_layer("", maker(**settings))


def _module_layer(name: str, layer: nn.Module) -> list[Layer] | None:
    if type(layer) in _ACTIVATIONS:
        return [Activate(_ACTIVATIONS[type(layer)])]
    if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return [Flatten()]
    if type(layer) is nn.Identity:
        return []
    reader = _READERS.get(type(layer))
    layer_form = None if reader is None else reader(f"{name}." if name else "", layer)
    return None if layer_form is None else [layer_form]


def _weight(prefix: str, layer: Any) -> str | None:
    return f"{prefix}weight" if layer.weight is not None else None


def _bias(prefix: str, layer: Any) -> str | None:
    return f"{prefix}bias" if layer.bias is not None else None


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _linear(prefix: str, layer: Any) -> Layer:
    return Linear(f"{prefix}weight", _bias(prefix, layer))


def _conv(prefix: str, layer: Any) -> Layer | None:
    if layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    shape = (_pair(layer.stride), _pair(layer.padding), _pair(layer.dilation))
    return Conv(f"{prefix}weight", _bias(prefix, layer), *shape)


def _embed(prefix: str, layer: Any) -> Layer | None:
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        return None
    return Embed(f"{prefix}weight", layer.padding_idx)


def _group_norm(prefix: str, layer: Any) -> Layer:
    names = (_weight(prefix, layer), _bias(prefix, layer))
    return GroupNorm(*names, layer.num_groups, layer.eps)


def _layer_norm(prefix: str, layer: Any) -> Layer:
    names = (_weight(prefix, layer), _bias(prefix, layer))
    return LayerNorm(*names, tuple(layer.normalized_shape), layer.eps)


def _max_pool(_: str, layer: Any) -> Layer | None:
    if layer.ceil_mode or layer.return_indices or _pair(layer.dilation) != (1, 1):
        return None
    return Pool("max", *map(_pair, (layer.kernel_size, layer.stride, layer.padding)))


def _mean_pool(_: str, layer: Any) -> Layer | None:
    if layer.ceil_mode or not layer.count_include_pad or layer.divisor_override is not None:
        return None
    return Pool("mean", *map(_pair, (layer.kernel_size, layer.stride, layer.padding)))


def _adaptive_pool(_: str, layer: Any) -> Layer | None:
    size = layer.output_size
    is_fixed = isinstance(size, int) or None not in size
    return AdaptivePool(_pair(size)) if is_fixed else None


def _dropout(_: str, layer: Any) -> Layer:
    return Dropout(layer.p, layer.salt, layer.channels)


_READERS: dict[type[nn.Module], Callable[[str, Any], Layer | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.Embedding: _embed,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _mean_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    KeyedDropout: _dropout,
}
