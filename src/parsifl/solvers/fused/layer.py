"""What the layers of a fused network have in common.

All values have the axes [clients, rows, ...], all weights a leading axis of clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

GradientSink = Callable[[Tensor, Tensor | None], None]
"""Takes a gradient: left @ right, or left itself. It may change the weight, in place.

A product has two axes behind that of the clients: the first of the weight, and all others; that of
a vector is one row.
"""


class ParameterStore(Protocol):
    """The owner of the weights, which takes the gradients."""

    def read(self, name: str) -> Tensor:
        """Return a weight of all clients; it changes in place."""

    def landing(self, name: str) -> GradientSink | None:
        """Return where the gradient of a weight goes; None if it is not asked for."""


class FusedLayer(Protocol):
    """One layer with the weights of a host: what does not change from step to step is made once.

    `forward` remembers what `backward` needs. `backward` lands the gradients of its weights and
    returns that of its input, or anything where it is not needed (`below` is false).
    It may overwrite the gradient it is given, and must read its weights before it lands on them.
    """

    def forward(self, value: Tensor, key: Tensor | None) -> Tensor:
        """Return the output; `key` [clients] is that of the mini-batch, for keyed randomness."""

    def backward(self, gradient: Tensor, below: bool) -> Tensor:
        """Land gradients, and return the gradient of the input."""


def read(host: ParameterStore, name: str | None) -> Tensor | None:
    """Return a weight that a layer may do without."""
    return None if name is None else host.read(name)


def landing(host: ParameterStore, name: str | None) -> GradientSink | None:
    """Return where the gradient of such a weight goes."""
    return None if name is None else host.landing(name)


def add_product_(
    target: Tensor, left: Tensor, right: Tensor | None, factor: float, keep: float = 1.0
) -> None:
    """Replace the target by keep * target + factor * left @ right (or factor * left)."""
    if right is not None:
        matrices = _matrices(target)
        if matrices.is_contiguous():
            matrices.baddbmm_(left, right, beta=keep, alpha=factor)
        else:  # it lies across: torch would copy it to and fro
            matrices.mT.baddbmm_(right.mT, left.mT, beta=keep, alpha=factor)
    elif keep == 1.0:
        target.add_(left, alpha=factor)
    else:
        target.mul_(keep).add_(left, alpha=factor)


def _matrices(weight: Tensor) -> Tensor:
    if weight.ndim == 2:
        return weight.unsqueeze(1)
    return weight if weight.ndim == 3 else weight.flatten(2)


def merged(value: Tensor) -> Tensor:
    """Return [clients, rows, channels, ...] as [rows, clients * channels, ...].

    Layers of images leave their output in this order in memory, so that this is a view.
    """
    return value.transpose(0, 1).flatten(1, 2)


def parted(value: Tensor, clients: int) -> Tensor:
    """Undo `merged`, as a view."""
    return value.view(len(value), clients, -1, *value.shape[2:]).transpose(0, 1)
