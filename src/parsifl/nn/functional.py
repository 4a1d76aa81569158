"""Calls a module with parameters that are passed in."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from parsifl.core.tracing import GATE


@final
class Functional:
    """A module without values of its own, which several threads may call at once.

    Parameters are put into the module for the time of a call, as `torch.func.functional_call`
    does, but their places are looked up once: for small models that look-up is a tenth of a step.
    Every call has a copy of the module to itself; copies are kept and share the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._idle: deque[_Slots] = deque()  # a deque may be used by several threads

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the module's output."""
        try:
            slots = self._idle.pop()
        except IndexError:
            slots = self._copy()
        GATE.enter()
        try:
            return slots.call(params, x)
        finally:
            GATE.leave()
            self._idle.append(slots)

    def _copy(self) -> _Slots:
        shared = {id(parameter): parameter for parameter in self._module.parameters()}
        return _Slots(copy.deepcopy(self._module, shared))


@final
class _Slots:
    """A module and where its parameters are kept."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = {
            f"{prefix}.{name}" if prefix else name: (layer._parameters, name, value)
            for prefix, layer in module.named_modules()
            for name, value in layer._parameters.items()
        }

    def call(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the output for these parameters; afterwards the module holds none of them."""
        places = [(self._places[name], value) for name, value in params.items()]
        try:
            for (table, name, _), value in places:
                table[name] = value
            output: Tensor = self._module(x)
            return output
        finally:
            for (table, name, empty), _ in places:
                table[name] = empty
