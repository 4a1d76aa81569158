"""What the functional form of a module needs beside its trained leaves.

Frozen parameters (a pretrained backbone) and constant buffers (positional encodings) are constants
of the problem: no algorithm sees them, and they are never sent. A tied parameter is one leaf under
its first name; the other names are filled from it in every call.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Params
from parsifl.nn.dropout import dropout_key
from parsifl.nn.module_checks import COUNTER, has_statistics


@final
@dataclass(frozen=True)
class FixedParts:
    """The constants and ties of a module.

    Attributes
    ----------
    constants
        Values of frozen parameters and constant buffers by name.
    ties
        For each further name of a tied parameter, its first one.
    """

    constants: Mapping[str, Tensor] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    _moved: dict[torch.device, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.constants or self.ties)

    def complete(self, params: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return values for all names of the module."""
        if device not in self._moved:
            self._moved[device] = {n: value.to(device) for n, value in self.constants.items()}
        tied = {name: params[first] for name, first in self.ties.items()}
        return {**self._moved[device], **params, **tied}


def fixed_parts(module: nn.Module, dtype: torch.dtype, *, federated: bool) -> FixedParts:
    """Return the constants and ties of a module.

    With `federated`, floating-point buffers are leaves of the parameters, not constants.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for name, layer, table, leaf in _entries(module):
        value = table[leaf]
        if table is layer._parameters:
            if first.setdefault(id(value), name) != name:
                ties[name] = first[id(value)]
            elif not value.requires_grad:
                constants[name] = value
        elif leaf != COUNTER and not has_statistics(layer):
            is_leaf = federated and value.is_floating_point()
            constants |= {} if is_leaf else {name: value}
    frozen = {name: to for name, to in ties.items() if to in constants}
    for name in frozen:  # both names are filled from the constants
        constants[name] = constants[ties.pop(name)]
    copies = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None, copy=True)
        for name, value in constants.items()
    }
    return FixedParts(copies, ties)


def without_fixed(module: nn.Module, fixed: FixedParts) -> nn.Module:
    """Leave only trained leaves among the parameters of a module, in place.

    Constants become buffers, and all names of a tied parameter refer to one object.
    """
    objects = {name: table[leaf] for name, _, table, leaf in _entries(module)}
    for name, layer, table, leaf in list(_entries(module)):
        if name in fixed.ties:
            table[leaf] = objects[fixed.ties[name]]
        elif name in fixed.constants and table is layer._parameters:
            layer._buffers[leaf] = table.pop(leaf).detach()
    return module


def check_unchanged(module: nn.Module, fixed: FixedParts, params: Params, x: Tensor) -> None:
    """Raise CapabilityError if the forward pass of training writes to a constant."""
    writable = copy.deepcopy(module)
    values = fixed.complete(params, torch.device("cpu"))
    for name, _, table, leaf in list(_entries(writable)):
        table[leaf] = values[name].clone()
    with torch.no_grad(), dropout_key(Key(0).tensor()):
        writable(x)
    for name, _, table, leaf in _entries(writable):
        if name in fixed.constants and not torch.equal(table[leaf], fixed.constants[name]):
            raise CapabilityError(
                f"the forward pass writes to the buffer '{name}', which would be lost: set "
                "buffers='average' to average it over clients, or 'local' to keep it on them"
            )


def check_repeatable(first: FixedParts, second: FixedParts) -> None:
    """Raise ConfigError if a factory draws its frozen parameters at random."""
    for name, value in first.constants.items():
        if not torch.equal(value, second.constants[name]):
            raise ConfigError(
                f"the factory draws the frozen parameter '{name}' at random, so every seed and "
                "every process would have another one: load its values in the factory, or pass "
                "the module itself"
            )


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any], str]]:
    """Yield name, layer, table and key of every parameter and buffer that has a value."""
    for prefix, layer in module.named_modules():
        tables: Collection[dict[str, Any]] = (layer._parameters, layer._buffers)
        for table in tables:
            for leaf in list(table):
                if table[leaf] is not None:
                    yield f"{prefix}.{leaf}" if prefix else leaf, layer, table, leaf
