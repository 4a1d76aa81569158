"""Where the non-zeros are: an entropy-coded set of k positions out of d.

Every position is a Bernoulli(k / d) symbol for an ANS coder. That costs d H(k/d) bits, which is
at most 1/2 log2(2 pi k (d - k) / d) more than the bound log2 C(d, k), plus one 32-bit word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20
"""Positions handled at a time, so that temporary memory does not grow with the tensor."""


def bound(size: int, count: int) -> float:
    """Return log2 C(size, count): no code for all such sets is shorter on average.

    >>> round(2 ** bound(5, 2))
    10
    """
    logarithm = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return max(logarithm / math.log(2), 0.0)


def information(size: int, count: int, item: int) -> float:
    """Return the bytes that `count` values of `item` bytes at unknown places hold at least."""
    return count * item + bound(size, count) / 8


def is_trivial(size: int, count: int) -> bool:
    """Tell whether the count alone says where the non-zeros are."""
    return count in (0, size)


def encode(mask: NDArray[np.bool_], count: int) -> bytes:
    """Code a mask with `count` ones; the receiver knows its size and the count.

    >>> len(encode(np.arange(1000) == 500, 1))
    4
    """
    if is_trivial(mask.size, count):
        return b""
    coder = constriction.stream.stack.AnsCoder()
    model = _model(mask.size, count)
    for start in reversed(range(0, mask.size, CHUNK)):  # a stack: the last in is the first out
        coder.encode_reverse(mask[start : start + CHUNK].astype(np.int32), model)
    words: NDArray[np.uint32] = coder.get_compressed()
    return words.astype("<u4").tobytes()


def decode(data: memoryview, size: int, count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the ascending positions chunk by chunk; 0 <= count <= size, words of four bytes.

    Raises
    ------
    ValueError
        If the bytes do not code exactly `count` positions; then at most `count` came before.
    """
    if is_trivial(size, count):
        for start in range(0, count, CHUNK):
            yield np.arange(start, min(start + CHUNK, count))
        return
    words = np.frombuffer(data, "<u4").astype(np.uint32)
    coder = constriction.stream.stack.AnsCoder(words)
    model = _model(size, count)
    left = count
    for start in range(0, size, CHUNK):
        found = np.flatnonzero(coder.decode(model, min(CHUNK, size - start)))
        left -= found.size
        if left < 0:
            break
        yield found + start
    if left or not coder.is_empty():
        raise ValueError(f"support does not code {count} of {size} positions")


def _model(size: int, count: int) -> Any:
    return constriction.stream.model.Bernoulli(count / size, perfect=False)
