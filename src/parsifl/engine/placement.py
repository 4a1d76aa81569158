"""Compute on another device than the CPU.

Messages, server states and client states are on the CPU. What a client computes with moves to the
device, and its results come back. Algorithms do not know about devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parsifl.core import tree
from parsifl.core.errors import ConfigError

CPU = torch.device("cpu")


def check_device(device: str | torch.device) -> torch.device:
    """Return the device; raise ConfigError if this machine or this build of torch lacks it."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"the device {str(device)!r} cannot be used: {first}") from error
    return found


def placed(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of trees that computes on a device.

    It runs under vmap as well: a batch of clients moves at once.
    """
    if device == CPU:
        return function

    def there(*arguments: Any) -> Any:
        moved = tree.map(lambda leaf: leaf.to(device), arguments)
        return tree.map(lambda leaf: leaf.to(CPU), function(*moved))

    return there
