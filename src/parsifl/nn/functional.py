"""Calls a module with parameters that are passed in."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor, nn

from parsifl.core._functorch import ModuleSlots
from parsifl.core.tracing import GATE

_Call = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@final
class Functional:
    """A module without values of its own, which several threads may call at once.

    Values are put into the module for the time of a call, as by `torch.func.functional_call`. Every
    call has a copy of the module to itself, since the forward pass may write to buffers. Copies are
    reused and share the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._idle: deque[_Call] = deque()  # a deque may be used by several threads

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the module's output."""
        try:
            slots = self._idle.pop()
        except IndexError:
            slots = self._copy()
        GATE.enter()
        try:
            return slots(params, x)
        finally:
            GATE.leave()
            self._idle.append(slots)

    def _copy(self) -> _Call:
        shared = {id(parameter): parameter for parameter in self._module.parameters()}
        return ModuleSlots(copy.deepcopy(self._module, shared))
