"""Calls a module with parameters that are passed in, and keeps calls apart from traces.

`torch.fx` patches `nn.Module` while it traces: another thread's call would be traced as well, so
a gate keeps the two apart.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition
from typing import final

from torch import Tensor, nn

from parsifl.core._functorch import ModuleSlots


class _Gate:
    """Lets calls pass together, and a trace alone."""

    def __init__(self) -> None:
        self._calls, self._condition = 0, Condition()

    def enter(self) -> None:
        """Begin the call of a module; waits for a trace to end."""
        with self._condition:
            self._calls += 1

    def leave(self) -> None:
        """End the call of a module."""
        with self._condition:
            self._calls -= 1
            if not self._calls:
                self._condition.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait for the calls under way, and let no other begin."""
        with self._condition:
            self._condition.wait_for(lambda: not self._calls)
            yield


GATE = _Gate()

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
