"""Call a module with given parameters, and separate calls from traces.

`torch.fx` patches `nn.Module` while it traces, so a call in another thread would be traced as well.
A lock separates the two.
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
from parsifl.nn.fixed import FixedParts


class _Gate:
    """A lock that many calls may share and a trace holds exclusively."""

    def __init__(self) -> None:
        self._calls, self._condition = 0, Condition()

    def enter(self) -> None:
        """Begin a call of a module; wait for a running trace."""
        with self._condition:
            self._calls += 1

    def leave(self) -> None:
        """End a call of a module."""
        with self._condition:
            self._calls -= 1
            if not self._calls:
                self._condition.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait for running calls, and block new ones."""
        with self._condition:
            self._condition.wait_for(lambda: not self._calls)
            yield


GATE = _Gate()

_Call = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@final
class Functional:
    """A module without its own values, which several threads may call at once.

    Values are set in the module for the duration of a call, as in `torch.func.functional_call`.
    Every call uses its own copy of the module, because the forward pass may write to buffers.
    Copies are reused and share the parameters. `fixed` completes the parameters of each call.
    """

    def __init__(self, module: nn.Module, fixed: FixedParts | None = None) -> None:
        self._module, self._fixed = module, fixed
        self._idle: deque[_Call] = deque()  # a deque is thread-safe

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the module's output."""
        try:
            slots = self._idle.pop()
        except IndexError:
            slots = self._copy()
        GATE.enter()
        try:
            return slots(self._fixed.complete(params, x.device) if self._fixed else params, x)
        finally:
            GATE.leave()
            self._idle.append(slots)

    def _copy(self) -> _Call:
        shared = {id(parameter): parameter for parameter in self._module.parameters()}
        return ModuleSlots(copy.deepcopy(self._module, shared))
