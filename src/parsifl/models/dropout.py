"""Dropout whose mask follows from a key, so that every engine drops the same units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from parsifl import keys
from parsifl.errors import ConfigError

_KEY: ContextVar[Tensor | None] = ContextVar("parsifl_dropout_key", default=None)


@contextmanager
def dropout_key(key: Tensor) -> Iterator[None]:
    """Set the key that every `KeyedDropout` called inside draws from."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


class KeyedDropout(nn.Module):
    """Zero each entry with probability p in training, scaling the others by 1 / (1 - p).

    Layers with different `salt` draw different masks from the same key.
    """

    def __init__(self, p: float = 0.5, salt: int = 0) -> None:
        super().__init__()
        self.p, self.salt = p, salt

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mask of the current key; the identity in evaluation."""
        if not self.training or self.p == 0:
            return x
        key = _KEY.get()
        if key is None:
            raise ConfigError(
                "KeyedDropout has no key: call the module through NeuralProblem, or inside "
                "dropout_key(key), or in evaluation mode"
            )
        kept = keys.uniform(key, tuple(x.shape), self.salt) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)
