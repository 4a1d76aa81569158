"""Entropy code of a set of k positions out of d, with a length known in advance.

Every position is a Bernoulli(k / d) event, so that all such sets have the same probability and
the same length, d H(k / d) bits: at most 1/2 log2(2 pi k (d - k) / d) more than log2 C(d, k).
A range coder takes 64 positions at a time: the symbol is the number c of ones among them and the
rank of their places among all C(64, c), of weight k^c (d - k)^(64 - c) / d^64.

Weights have 128 bits and the span of the coder at least 192, in exact integers, so that a symbol
takes at most 2^-62 bits more than its information content, on every machine. `length` can therefore
return the number of bytes without coding anything.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20
"""Positions handled at a time, so that temporary memory does not grow with the tensor."""

_BLOCK = 64
_WEIGHT = 128
_WORD = 64
_LAST = (1 << _WORD) - 1
_SPAN = 256
_LEAST = 1 << (_SPAN - _WORD)
_CHOOSE = np.array([[math.comb(n, c) for c in range(_BLOCK + 1)] for n in range(_BLOCK)])


def bound(size: int, count: int) -> float:
    """Return log2 C(size, count): no code for all such sets is shorter on average.

    >>> round(2 ** bound(5, 2))
    10
    """
    logarithm = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return max(logarithm / math.log(2), 0.0)


def information(size: int, count: int, item: int) -> float:
    """Return a lower bound on the bytes of `count` values of `item` bytes at unknown positions."""
    return count * item + bound(size, count) / 8


def is_trivial(size: int, count: int) -> bool:
    """Return whether the count alone determines where the non-zeros are."""
    return count in (0, size)


def length(size: int, count: int) -> int:
    """Return the bytes of `encode` for every mask of this size with this many ones.

    >>> length(1000, 1)
    2
    """
    if is_trivial(size, count):
        return 0
    total, ones, zeros = (n * math.log2(n) for n in (size, count, size - count))
    # far more than the loss of symbols and of floating-point rounding
    slack = 2.0**-10 + size * 2.0**-40
    return math.ceil((total - ones - zeros + slack) / 8)


class _Model(NamedTuple):
    """The interval of each symbol: the start of those with c ones, and the width of each."""

    starts: list[int]
    weights: list[int]


@functools.lru_cache(maxsize=64)
def _model(size: int, count: int, width: int) -> _Model:
    """Divide 2^128 among the symbols of `width` positions, rounding up in their favour."""
    shared, total = (1 << _WEIGHT) - (1 << width), size**width
    weights, starts = [], [0]
    for ones in range(width + 1):
        weights.append(-(-shared * count**ones * (size - count) ** (width - ones) // total))
        starts.append(starts[-1] + math.comb(width, ones) * weights[-1])
    return _Model(starts, weights)


def encode(mask: NDArray[np.bool_], count: int) -> bytes:
    """Code a mask with `count` ones; the receiver knows its size and the count.

    >>> len(encode(np.arange(1000) == 500, 1))
    2
    """
    if is_trivial(mask.size, count):
        return b""
    writer, model = _Writer(), _model(mask.size, count, _BLOCK)
    for start in range(0, mask.size, CHUNK):
        counts, ranks = _symbols(mask[start : start + CHUNK])
        full = min(CHUNK, mask.size - start) // _BLOCK
        writer.write(model, counts[:full], ranks[:full])
    if mask.size % _BLOCK:
        writer.write(_model(mask.size, count, mask.size % _BLOCK), counts[full:], ranks[full:])
    return writer.finished(length(mask.size, count))


def _symbols(mask: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Return for each block its number of ones, and the rank of their places."""
    positions = np.flatnonzero(mask)
    block = positions // _BLOCK
    counts = np.bincount(block, minlength=-(-mask.size // _BLOCK))
    before = np.cumsum(counts) - counts
    # the combinatorial number system: the sum of C(place, turn) over the ones of a block
    turn = np.arange(1, positions.size + 1) - before[block]
    ranks, filled = np.zeros(counts.size, np.int64), np.flatnonzero(counts)
    if filled.size:
        ranks[filled] = np.add.reduceat(_CHOOSE[positions % _BLOCK, turn], before[filled])
    return counts.tolist(), ranks.tolist()


class _Writer:
    """A range coder: the `span` numbers from `low` on begin with the symbols written so far."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._low, self._span = 0, 1 << _SPAN

    def write(self, model: _Model, counts: Sequence[int], ranks: Sequence[int]) -> None:
        """Narrow the interval symbol by symbol."""
        (starts, weights), low, span = model, self._low, self._span
        for ones, rank in zip(counts, ranks, strict=True):
            unit, weight = span >> _WEIGHT, weights[ones]
            low += unit * (starts[ones] + rank * weight)
            span = unit * weight
            while span < _LEAST:
                low, span = self._shifted(low), span << _WORD
        self._low, self._span = low, span

    def _shifted(self, low: int) -> int:
        """Write out the first word, including its carry."""
        word = low >> (_SPAN - _WORD)
        if word > _LAST:
            at = len(self._words) - 1
            while self._words[at] == _LAST:
                self._words[at] = 0
                at -= 1
            self._words[at] += 1
        self._words.append(word & _LAST)
        return (low & (_LEAST - 1)) << _WORD

    def finished(self, size: int) -> bytes:
        """Return the first number of the interval that ends after `size` bytes."""
        for _ in range(_SPAN // _WORD):
            self._low = self._shifted(self._low)
        data = b"".join([word.to_bytes(_WORD // 8, "big") for word in self._words])
        number = int.from_bytes(data[:size].ljust(size, b"\0"), "big")
        return (number + any(data[size:])).to_bytes(size, "big")


def decode(data: memoryview, size: int, count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the ascending positions chunk by chunk; 0 <= count <= size.

    Raises
    ------
    ValueError
        If the bytes do not code exactly `count` positions; at most `count` are yielded before.
    """
    if type(count) is not int or not 0 <= count <= size:
        raise ValueError(f"{count!r} of {size} positions is not a support")
    if is_trivial(size, count):
        for start in range(0, count, CHUNK):
            yield np.arange(start, min(start + CHUNK, count))
        return
    reader, model, left = _Reader(bytes(data)), _model(size, count, _BLOCK), count
    for start in range(0, size, CHUNK):
        full, tail = divmod(min(CHUNK, size - start), _BLOCK)
        counts, ranks = reader.read(model, full)
        if tail:
            last = reader.read(_model(size, count, tail), 1)
            counts, ranks = counts + last[0], ranks + last[1]
        positions = _places(np.array(counts), np.array(ranks), np.flatnonzero(counts))
        left -= positions.size
        if left < 0:
            break
        yield positions + start
    if left or not reader.is_exact():
        raise ValueError(f"support does not code {count} of {size} positions")


def _places(
    counts: NDArray[np.int64], ranks: NDArray[np.int64], filled: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Undo `_symbols`, all blocks that are not empty at once."""
    skipped = filled - np.arange(filled.size)
    if filled.size < counts.size:
        counts, ranks = counts[filled], ranks[filled]
    bits = np.zeros((_BLOCK, counts.size), np.bool_)
    for bit in reversed(range(_BLOCK)):
        below = _CHOOSE[bit].take(counts)  # 1 where no ones are left; the rank is then 0
        np.greater_equal(ranks, below, out=bits[bit])
        ranks -= below * bits[bit]
        counts -= bits[bit]
    positions = np.flatnonzero(bits.T)
    return positions + _BLOCK * skipped[positions // _BLOCK] if skipped.any() else positions


class _Reader:
    """Undoes `_Writer`: `rest` is the distance of the number from the start of the interval."""

    def __init__(self, data: bytes) -> None:
        step = _WORD // 8
        padded = data + bytes(-len(data) % step)
        self._words: Iterator[int] = iter(np.frombuffer(padded, ">u8").tolist())
        self._rest, self._span, self._unread = 0, 1 << _SPAN, 8 * len(data)
        for _ in range(_SPAN // _WORD):
            self._rest = self._shifted(self._rest)

    def _shifted(self, rest: int) -> int:
        """Read the next word; zeros follow the last one."""
        self._unread -= _WORD
        return rest << _WORD | next(self._words, 0)

    def read(self, model: _Model, blocks: int) -> tuple[list[int], list[int]]:
        """Return the numbers of ones and the ranks of the next blocks."""
        (starts, weights), rest, span = model, self._rest, self._span
        counts, ranks, empty = [0] * blocks, [0] * blocks, weights[0]
        for block in range(blocks):
            unit = span >> _WEIGHT
            span = unit * empty
            if rest >= span:  # not all of them are zero, as most are in a sparse tensor
                number = rest // unit
                if number >= starts[-1]:
                    raise ValueError(
                        "support is not a valid code: a number lies beyond the last symbol"
                    )
                ones = bisect_right(starts, number) - 1
                start, weight = starts[ones], weights[ones]
                rank = (number - start) // weight
                counts[block], ranks[block] = ones, rank
                rest -= unit * (start + rank * weight)
                span = unit * weight
            while span < _LEAST:
                rest, span = self._shifted(rest), span << _WORD
        self._rest, self._span = rest, span
        return counts, ranks

    def is_exact(self) -> bool:
        """Return whether no smaller number of this length codes the same support."""
        return self._rest >> max(-self._unread, 0) == 0 and not any(self._words)
