"""Dropout with a keyed mask, so that it is the same in every executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch
from torch import Tensor, nn

from parsifl.core import keys
from parsifl.core.errors import ConfigError

_KEY: ContextVar[Tensor | None] = ContextVar("parsifl_dropout_key", default=None)


@contextmanager
def dropout_key(key: Tensor) -> Iterator[None]:
    """Use this 0-dim int64 tensor as the key of KeyedDropout layers inside the context."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


@final
class KeyedDropout(nn.Module):
    """Dropout from `keys.uniform(key, shape, salt)`; give each layer of a model its own salt.

    With `channels=True` whole channels are dropped (Dropout2d). In eval mode it is the identity.
    """

    def __init__(self, p: float = 0.5, salt: int = 0, *, channels: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout probability is {p}; it must be between 0 and 1")
        self.p, self.salt, self.channels = p, salt, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return x with entries dropped and the others scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0.0:
            return x
        key = _KEY.get()
        if key is None:
            raise ConfigError(
                "KeyedDropout runs in training mode without a key; wrap the call in "
                "`with parsifl.nn.models.dropout_key(key):` or call module.eval()"
            )
        if self.p == 1.0:
            return torch.zeros_like(x)
        shape = tuple(x.shape)
        if self.channels:
            shape = shape[:2] + (1,) * (len(shape) - 2)
        keep = keys.uniform(key, shape, self.salt) >= self.p
        return x * keep.to(x.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"p={self.p}, salt={self.salt}, channels={self.channels}"
