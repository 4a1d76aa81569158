"""The layers that the fused solver runs by hand, each by the names of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "tanh", "sigmoid"]
Pair = tuple[int, int]


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
    """Everything behind the batch axis becomes one axis."""


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
