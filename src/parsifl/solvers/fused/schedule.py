"""The steps of a block of clients, and the rows that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from parsifl.core import keys
from parsifl.core._functorch import Leaf


class Step(NamedTuple):
    """One step of the first `clients`: their rows, and the share of each row in the loss.

    `key` [clients] is that of the mini-batch; None if no layer needs it.
    """

    clients: int
    x: Tensor
    y: Tensor
    scale: Tensor
    key: Tensor | None = None


@final
class Schedule:
    """The steps of a block, its clients ordered so that longer schedules come first.

    The data are x and y of all clients, `index` and `weight` [clients, steps, rows], `active`
    [clients, steps] and `key` [clients]. The loss of a step is a weighted mean over each of
    `parts` equal parts.
    """

    def __init__(self, data: tuple[Tensor, ...], *, keyed: bool, parts: int = 1) -> None:
        self._x, y, index, weight, active, key = data
        steps = active.sum(1)
        descending = bool((steps[1:] <= steps[:-1]).all())
        self._order = None if descending else steps.argsort(descending=True, stable=True)
        # steps first, and all labels at once: a step is then one view of each
        self._index = self.arranged(index).transpose(0, 1).contiguous()
        self._y = y[self._index]
        shares = self.arranged(weight).reshape(*weight.shape[:-1], parts, -1)
        self._scale = row_scale(shares).flatten(-2).transpose(0, 1).contiguous()
        self._key = self.arranged(key) if keyed else None
        self._alive: list[int] = active.sum(0).tolist()

    def __iter__(self) -> Iterator[Step]:
        x, (_, clients, rows) = self._x, self._index.shape
        # one buffer for the rows of all steps: new memory would cost a page fault per 4 kB
        buffer = x.new_empty(clients * rows, *x.shape[1:])
        inputs = buffer.view(clients, rows, *x.shape[1:])
        taken = zip(self._alive, self._index.flatten(1), self._y, self._scale, strict=True)
        for step, (count, index, y, scale) in enumerate(taken):
            if not count:
                continue
            key = None if self._key is None else keys.fold(self._key[:count], step)
            if count == clients:
                torch.index_select(x, 0, index, out=buffer)
                yield Step(count, inputs, y, scale, key)
            else:
                size = count * rows
                torch.index_select(x, 0, index[:size], out=buffer[:size])
                yield Step(count, inputs[:count], y[:count], scale[:count], key)

    def owned(self, leaf: Leaf) -> Tensor:
        """Return a copy for every client, in the order of the schedule."""
        tensor, dim = leaf
        if dim is None:
            tensor = tensor.expand(self._index.shape[1], *tensor.shape)
        elif self._order is not None:
            return tensor.movedim(dim, 0).index_select(0, self._order)
        else:
            tensor = tensor.movedim(dim, 0)
        return tensor.clone(memory_format=torch.contiguous_format)

    def shared(self, leaf: Leaf) -> Tensor:
        """Return the tensor in the order of the schedule; the axis is 1 if clients share it."""
        tensor, dim = leaf
        return tensor[None] if dim is None else self.arranged(tensor.movedim(dim, 0))

    def arranged(self, tensor: Tensor) -> Tensor:
        """Reorder clients to the order of the schedule."""
        return tensor if self._order is None else tensor.index_select(0, self._order)

    def restored(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Restore the original order of clients."""
        if self._order is None:
            return tuple(tensors)
        back = self._order.argsort()
        return tuple(tensor.index_select(0, back) for tensor in tensors)


def row_scale(weight: Tensor) -> Tensor:
    """Return the share of each row in the loss, sum(weight * l) / sum(weight)."""
    return weight / weight.sum(-1, keepdim=True).clamp(min=1)
