"""Counter-based randomness: every number is determined by (seed, round, client, purpose).

No generator is advanced from one use to the next, so results depend neither on the order in
which clients run nor on how they are batched, and the global generators stay untouched.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
NO_CLIENT = -1
_kept = threading.local()


@dataclass(frozen=True)
class Key:
    """Where in a run a random number is drawn.

    >>> Key(7).replace(round=3, client=2, purpose="batches").numpy_generator().integers(100) < 100
    np.True_
    """

    seed: int
    round: int = 0
    client: int = NO_CLIENT
    purpose: str = ""

    def replace(self, **changes: Any) -> Key:
        """Return this key with some fields replaced."""
        # what dataclasses.replace does, several times faster: every client asks in every round
        return Key(**{**self.__dict__, **changes})

    def word(self) -> int:
        """Return 64 bits that identify the key (a hash, so that purposes cannot collide)."""
        return self.words([self.client])[0]

    def words(self, clients: Iterable[int]) -> list[int]:
        """Return the words of this key for each of these clients."""
        seed, purpose = _signed(self.seed % (1 << 64)), self.purpose.encode()
        packed = (struct.pack("<qqq", seed, self.round, client) + purpose for client in clients)
        digests = [hashlib.blake2b(key, digest_size=8).digest() for key in packed]
        return [int.from_bytes(digest, "little") for digest in digests]

    def numpy_generator(self) -> np.random.Generator:
        """Return a fresh NumPy generator for this key."""
        import numpy as np

        return np.random.Generator(np.random.Philox(key=self.word()))

    def generators(self, clients: Iterable[int]) -> Iterator[np.random.Generator]:
        """Yield the NumPy generator of each client; use it before you take the next one.

        They are one object per thread, reset each time: creating a new one would take ten times as
        long.
        """
        if not hasattr(_kept, "generator"):
            _kept.generator = self.numpy_generator()
            _kept.state = _kept.generator.bit_generator.state
        generator, state = _kept.generator, _kept.state
        for word in self.words(clients):
            state["state"]["key"][0] = word
            generator.bit_generator.state = state
            yield generator

    def torch_generator(self) -> torch.Generator:
        """Return a fresh torch generator (on the CPU) for this key."""
        import torch

        return torch.Generator().manual_seed(self.word() >> 1)

    def tensor(self) -> Tensor:
        """Return the key as a 0-dim int64 tensor, to be used with `uniform` under vmap."""
        return self.tensors([self.client])[0]

    def tensors(self, clients: Iterable[int]) -> tuple[Tensor, ...]:
        """Return the tensors of this key for each of these clients."""
        import numpy as np
        import torch

        words = np.array(self.words(clients), np.uint64)
        tensors: tuple[Tensor, ...] = torch.from_numpy(words.view(np.int64)).unbind()
        return tensors


def uniform(key: Tensor, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Draw float32 uniforms in [0, 1) from an int64 scalar key.

    SplitMix64 over a counter, in plain integer tensor arithmetic: under `torch.func.vmap`, in a
    loop and on another machine the same key gives the same numbers. Calls with different `salt`
    (below 2**31) are independent.
    """
    import torch

    count = math.prod(shape)
    counter = torch.arange(1, count + 1, device=key.device) + (salt << 32)
    word = _mix(counter * _signed(_GOLDEN) + key)
    return (_shift_right(word, 40).to(torch.float32) * (1.0 / (1 << 24))).reshape(shape)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """Derive a new key, for a numbered sub-stream (a step, a layer), or many for many numbers."""
    return _mix((key ^ number) + _signed(_GOLDEN))


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shift_right(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shift_right(word, 27)) * _signed(_MIX_2)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    # int64 shifts keep the sign: masking makes the shift logical
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
