"""Plain code inside a batched computation: a function of tensors with a leading client axis.

Under `torch.func.vmap` no value may be looked at. What needs to look (which rows are read, which
pivots vanish) runs here: the function gets real tensors for all clients of the block at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Batched = Callable[..., tuple[Tensor, ...]]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(function: Batched, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(found[0] for found in function(*(tensor[None] for tensor in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Batched, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        aligned = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        found = function(*aligned)
        return found, (0,) * len(found)


def eager(function: Batched, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of tensors [clients, ...] to one client's tensors; batches come whole.

    >>> eager(lambda v: (v * v.count_nonzero(),), torch.tensor([0.0, 2.0]))
    (tensor([0., 2.]),)
    """
    result: tuple[Tensor, ...] = _Eager.apply(function, *tensors)  # type: ignore[no-untyped-call]  # torch
    return result
