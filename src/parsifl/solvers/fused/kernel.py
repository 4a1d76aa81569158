"""What the layers of a fused network have in common.

All values have the axes [clients, rows, ...], all weights a leading axis of clients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Host(Protocol):
    """Whoever owns the weights and takes the gradients."""

    def read(self, name: str) -> Tensor:
        """Return a weight of all clients."""

    def wants(self, name: str) -> bool:
        """Tell whether the gradient of a weight is asked for."""

    def land(self, name: str, left: Tensor, right: Tensor | None) -> None:
        """Take a gradient: left @ right, or left itself. It may change the weight.

        A product has two axes behind that of the clients: the first of the weight, and all others.
        """


class Trace(NamedTuple):
    """What a layer remembers of its forward pass: input, output, and `kept` of its own."""

    value: Tensor
    output: Tensor
    kept: Any = None


class Kernel(Protocol):
    """One kind of layer, forward and backward.

    `backward` lands the gradients of its weights and returns that of its input; where nobody needs
    the latter (`below` is false) it returns anything. It may overwrite the gradient it is given,
    and must read its weights before it lands on them.
    """

    def forward(self, layer: Any, host: Host, value: Tensor, key: Tensor | None) -> Trace:
        """Return the output; `key` [clients] is that of the mini-batch, for keyed randomness."""

    def backward(
        self, layer: Any, host: Host, trace: Trace, gradient: Tensor, below: bool
    ) -> Tensor:
        """Land gradients, and return the gradient of the input."""


def land_sum(host: Host, name: str | None, gradient: Tensor, axes: tuple[int, ...]) -> None:
    """Land a gradient that is summed over some axes, if it is wanted."""
    if name is not None and host.wants(name):
        host.land(name, gradient.sum(axes), None)


def add_product_(
    target: Tensor, left: Tensor, right: Tensor | None, factor: float, keep: float = 1.0
) -> None:
    """Replace the target by keep * target + factor * left @ right (or factor * left)."""
    if right is not None:
        flat = target if target.ndim == 3 else target.view(*target.shape[:2], -1)
        flat.baddbmm_(left, right, beta=keep, alpha=factor)
    elif keep == 1.0:
        target.add_(left, alpha=factor)
    else:
        target.mul_(keep).add_(left, alpha=factor)


def merged(value: Tensor) -> Tensor:
    """Return [clients, rows, channels, ...] as [rows, clients * channels, ...].

    Layers of pictures leave their output in this order in memory, so that this is a view.
    """
    return value.transpose(0, 1).flatten(1, 2)


def parted(value: Tensor, clients: int) -> Tensor:
    """Undo `merged`, as a view."""
    return value.view(len(value), clients, -1, *value.shape[2:]).transpose(0, 1)
