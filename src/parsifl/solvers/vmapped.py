"""A gradient under vmap over clients, once and for all.

`torch.func.grad` records the backward pass too, in case somebody differentiates it again, and looks
through trees of arguments: a tenth of the time of a small model (docs/adr/0007).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parsifl.core.problem import Params

_functorch: Any = torch._C._functorch


def inside_vmap() -> bool:
    """Tell whether the innermost transformation is the one vmap over clients."""
    interpreter = _functorch.peek_interpreter_stack()
    kind = _functorch.TransformType.Vmap
    return interpreter is not None and interpreter.level() == 1 and interpreter.key() == kind


def gradient(loss: Callable[[Params], Tensor], params: Params) -> Params:
    """Return the gradient of a loss where `inside_vmap`; it cannot be differentiated again."""
    level = _functorch._grad_increment_nesting()
    try:
        with torch.enable_grad():
            leaves = {name: _leaf(value, level) for name, value in params.items()}
            value = loss(leaves)
            if value.requires_grad:
                found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            else:  # it reads none of them
                found = tuple(map(torch.zeros_like, leaves.values()))
        named = zip(leaves, found, strict=True)
        return {name: _functorch._unwrap_for_grad(slope, level) for name, slope in named}
    finally:
        _functorch._grad_decrement_nesting()


def _leaf(value: Tensor, level: int) -> Tensor:
    before = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        leaf: Tensor = _functorch._wrap_for_grad(value, level).requires_grad_()
    finally:
        _functorch.set_inplace_requires_grad_allowed(before)
    return leaf
