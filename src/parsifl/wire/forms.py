"""How one tensor travels: dense, or the support of its non-zeros and their values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsifl.errors import WireError
from parsifl.messages import Sparse
from parsifl.wire import support, values
from parsifl.wire.frame import Reader, Spec, varint

_DENSE = -1
_WORD = 4
_WORTHWHILE = 1 << 16
_SMALL = 1 << 10


class Form(NamedTuple):
    """A tensor, ready to be written; `nonzeros` is -1 for the dense form.

    `information` is the bytes that theory asks for at least (see `measure.entropy_size`).
    """

    size: int
    nonzeros: int
    support: bytes
    scale: bytes
    entries: NDArray[Any]
    boolean: bool
    information: float

    def record(self) -> bytes:
        """Return the entry in the table of records."""
        if support.is_trivial(self.size, self.nonzeros) or self.nonzeros == _DENSE:
            return varint(self.nonzeros + 1)
        return varint(self.nonzeros + 1) + varint(len(self.support) // _WORD)

    def length(self) -> int:
        """Return the bytes that this tensor adds to a message."""
        return len(self.record()) + len(self.support) + len(self.scale) + self.values_size()

    def values_size(self) -> int:
        """Return the bytes of the values."""
        if self.boolean:
            return -(-self.size // 8) if self.nonzeros == _DENSE else 0
        return self.entries.nbytes

    def pieces(self) -> Iterator[Any]:
        """Give the bytes in their order in the message."""
        yield self.support
        yield self.scale
        if not self.boolean:
            yield self.entries.astype(self.entries.dtype.newbyteorder("<"), copy=False).data
        elif self.nonzeros == _DENSE:
            yield np.packbits(self.entries.view(np.bool_), bitorder="little").data


def of_tensor(tensor: Tensor, precision: str, name: str, checked: bool) -> Form:
    """Choose the shorter form of a tensor; with `checked`, infinities and NaN are refused."""
    narrow = values.stored(tensor.dtype, tensor.numel(), precision)
    if (checked or narrow != tensor.dtype) and not values.all_finite(tensor):
        raise WireError(f"{name}: holds NaN or infinity; drop this message")
    short, scale = values.narrowed(tensor, narrow)
    bits = values.to_bits(short)
    return _shorter(bits, int(np.count_nonzero(bits)), scale, narrow == torch.bool)


def _shorter(bits: NDArray[Any], count: int, scale: bytes, boolean: bool) -> Form:
    length = -(-bits.size // 8) if boolean else bits.nbytes
    least = support.information(bits.size, count, 0 if boolean else bits.itemsize)
    dense = Form(bits.size, _DENSE, b"", scale, bits, boolean, min(least, length))
    # most dense tensors end here, without any coding: their zeros cannot pay for the support, or
    # so little that a handful of zeros among millions is not worth the time
    if least >= length - length // _WORTHWHILE:
        return dense
    mask = bits.view(np.bool_) if boolean else bits != 0
    code = support.encode(mask, count)
    entries = mask if boolean else bits[mask]
    sparse = Form(bits.size, count, code, scale, entries, boolean, dense.information)
    return sparse if sparse.length() < dense.length() else dense


def of_sparse(leaf: Sparse, precision: str, name: str, checked: bool) -> Form:
    """Choose the shorter form of a `Sparse`; a stored zero keeps its place in the support."""
    size = math.prod(leaf.shape)
    index, count = leaf.index.detach().cpu().numpy(), leaf.index.numel()
    ordered = index.ndim == 1 and index.dtype == np.int64 and bool(np.all(np.diff(index) > 0))
    if not ordered or (count and not 0 <= index[0] <= index[-1] < size):
        raise WireError(f"{name}: index is not a list of ascending int64 positions below {size}")
    if leaf.value.shape != leaf.index.shape:
        raise WireError(f"{name}: {count} positions for values of shape {tuple(leaf.value.shape)}")
    narrow = values.stored(leaf.value.dtype, size, precision)
    if (checked or narrow != leaf.value.dtype) and not values.all_finite(leaf.value):
        raise WireError(f"{name}: holds NaN or infinity; drop this message")
    short, scale = values.narrowed(leaf.value, narrow)
    bits, boolean = values.to_bits(short), narrow == torch.bool
    filled = int(np.count_nonzero(bits)) == count
    if filled and (boolean or 2 * count > size or size < _SMALL):  # the dense form may be shorter
        dense = np.zeros(size, bits.dtype)
        dense[index] = bits
        return _shorter(dense, count, scale, boolean)
    if boolean and not filled:
        raise WireError(f"{name}: a sparse bool tensor stores False; leave those positions out")
    mask = np.zeros(size, np.bool_)
    mask[index] = True
    entries = mask if boolean else bits
    least = support.information(size, count, 0 if boolean else bits.itemsize)
    length = -(-size // 8) if boolean else size * bits.itemsize
    code = support.encode(mask, count)
    return Form(size, count, code, scale, entries, boolean, min(least, length))


def padded(shape: tuple[int, ...]) -> int:
    """Return the entries of a shape, where a size of zero must not hide strides that overflow."""
    return math.prod(max(size, 1) for size in shape)


class Record(NamedTuple):
    """What a message says about one tensor before its bytes come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    narrow: torch.dtype
    nonzeros: int
    words: int

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return math.prod(self.shape)

    def held(self, sparse: bool) -> int:
        """Return the bytes of memory that this tensor will take, as a `Sparse` or dense."""
        if not sparse:
            return padded(self.shape) * self.dtype.itemsize
        entries = self.size if self.nonzeros == _DENSE else self.nonzeros
        return entries * (self.dtype.itemsize + torch.int64.itemsize)

    def lengths(self) -> tuple[int, int, int]:
        """Return the bytes of support, scale and values."""
        scale = values.scale_size(self.dtype, self.narrow)
        stored = self.size if self.nonzeros == _DENSE else self.nonzeros
        size = stored * self.narrow.itemsize
        if self.narrow == torch.bool:
            size = -(-self.size // 8) if self.nonzeros == _DENSE else 0
        return self.words * _WORD, scale, size


def read_record(reader: Reader, spec: Spec, shape: tuple[int, ...], precision: str) -> Record:
    """Read a record and check it against the shape of its tensor."""
    size = math.prod(shape)
    nonzeros = reader.varint(spec.name) - 1
    if nonzeros > size:
        raise WireError(f"{spec.name}: {nonzeros} non-zeros in a tensor of {size} entries")
    coded = nonzeros != _DENSE and not support.is_trivial(size, nonzeros)
    words = reader.varint(spec.name) if coded else 0
    narrow = values.stored(spec.dtype, size, precision)
    return Record(spec.name, spec.dtype, shape, narrow, nonzeros, words)


def read_tensor(reader: Reader, record: Record) -> Tensor:
    """Read a tensor, whichever form it has."""
    code, scale, entries = _read(reader, record)
    if record.nonzeros != _DENSE:
        bits = np.zeros(record.size, entries.dtype)
        filled = 0
        for found in _positions(code, record):
            bits[found] = entries[filled : filled + found.size]
            filled += found.size
        entries = bits
    return _finished(entries, scale, record, record.shape)


def read_sparse(reader: Reader, record: Record) -> Sparse:
    """Read a `Sparse`, whichever form it has."""
    code, scale, entries = _read(reader, record)
    if record.nonzeros == _DENSE:
        index = np.flatnonzero(entries)
        entries = entries[index]
    else:
        index = np.empty(record.nonzeros, np.int64)
        filled = 0
        for found in _positions(code, record):
            index[filled : filled + found.size] = found
            filled += found.size
    value = _finished(entries, scale, record, (index.size,))
    return Sparse(torch.from_numpy(index.astype(np.int64, copy=False)), value, record.shape)


def _read(reader: Reader, record: Record) -> tuple[memoryview, bytes, NDArray[Any]]:
    code_size, scale_size, values_size = record.lengths()
    code = reader.take(code_size, record.name)
    scale = bytes(reader.take(scale_size, record.name))
    data = reader.take(values_size, record.name)
    if record.narrow != torch.bool:
        kind = np.dtype(values.bits_dtype(record.narrow))
        return code, scale, np.frombuffer(data, kind).astype(kind.newbyteorder("="))
    if record.nonzeros != _DENSE:
        return code, scale, np.broadcast_to(np.int8(1), record.nonzeros)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[record.size :].any():
        raise WireError(f"{record.name}: bits are set after the last entry")
    return code, scale, bits[: record.size].view(np.int8)


def _positions(code: memoryview, record: Record) -> Iterator[NDArray[np.intp]]:
    try:
        yield from support.decode(code, record.size, record.nonzeros)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from error


def _finished(
    entries: NDArray[Any], scale: bytes, record: Record, shape: tuple[int, ...]
) -> Tensor:
    short = values.from_bits(np.require(entries, requirements="W"), record.narrow, shape)
    if not values.all_finite(short):
        raise WireError(f"{record.name}: holds NaN or infinity; drop this message")
    try:
        return values.widened(short, record.dtype, scale)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from error
