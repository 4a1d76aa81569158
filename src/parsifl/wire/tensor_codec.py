"""Encoding of one tensor: dense, or the support of its non-zeros and their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsifl.core.errors import WireError
from parsifl.core.leaves import Sparse
from parsifl.wire import quantization, range_coder
from parsifl.wire.frame import Reader, Spec, varint

_DENSE = -1
_WORTHWHILE = 1 << 16
_MOST_ENTRIES = 1 << 62


class Layout(NamedTuple):
    """What determines the length of a tensor; `nonzeros` is -1 for the dense form.

    `length` is in bytes, without the scale; `information` is the lower bound (see
    `message_size.entropy_size`).
    """

    nonzeros: int
    record: bytes
    length: int
    information: float


@functools.lru_cache(maxsize=4096)
def layout(size: int, count: int, item: int, fixed: bool = False) -> Layout:
    """Choose the shorter form of `size` entries, `count` of them not zero.

    Parameters
    ----------
    size, count
        The numbers of entries and of those that a support would list.
    item
        The bytes of an entry; 0 for booleans, which are packed.
    fixed
        Whether the support must be sent, regardless of its length.
    """
    full = size * item if item else -(-size // 8)
    least = range_coder.information(size, count, item)
    code = range_coder.length(size, count)
    record = varint(count + 1) + (b"" if range_coder.is_trivial(size, count) else varint(code))
    sparse = Layout(count, record, len(record) + code + count * item, min(least, full))
    dense = Layout(_DENSE, varint(0), 1 + full, min(least, full))
    # a few zeros among millions are not worth the coding time
    if fixed or (least < full - full // _WORTHWHILE and sparse.length < dense.length):
        return sparse
    return dense


class Form(NamedTuple):
    """A tensor, ready to be written: entries as bits, and their positions (None: all).

    `reals` is how many of the entries are real values.
    """

    layout: Layout
    size: int
    scale: bytes
    bits: NDArray[Any]
    places: NDArray[np.int64] | None
    boolean: bool
    reals: int

    def length(self) -> int:
        """Return the bytes that this tensor adds to a message."""
        return self.layout.length + len(self.scale)

    def pieces(self) -> Iterator[Any]:
        """Yield the bytes in message order."""
        if self.layout.nonzeros == _DENSE:
            yield self.scale
            entries = self._whole()
            if self.boolean:
                entries = np.packbits(entries.view(np.bool_), bitorder="little")
            yield _written(entries)
            return
        mask = self._mask()
        yield range_coder.encode(mask, self.layout.nonzeros)
        yield self.scale
        if not self.boolean:
            yield _written(self.bits if self.places is not None else self.bits[mask])

    def _whole(self) -> NDArray[Any]:
        if self.places is None:
            return self.bits
        entries = np.zeros(self.size, self.bits.dtype)
        entries[self.places] = self.bits
        return entries

    def _mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.size, np.bool_)
        if self.places is None:
            np.not_equal(self.bits, 0, out=mask)
        else:
            mask[self.places] = True
        return mask


def _written(entries: NDArray[Any]) -> memoryview:
    return entries.astype(entries.dtype.newbyteorder("<"), copy=False).data


def of_tensor(tensor: Tensor, precision: str, name: str, checked: bool) -> Form:
    """Choose the shorter form of a tensor; with `checked`, infinities and NaN are rejected."""
    size = tensor.numel()
    bits, scale = _bits(tensor, size, precision, name, checked)
    boolean = tensor.dtype == torch.bool
    chosen = layout(size, int(np.count_nonzero(bits)), 0 if boolean else bits.itemsize)
    reals = size if tensor.is_floating_point() else 0
    return Form(chosen, size, scale, bits, None, boolean, reals)


def of_sparse(leaf: Sparse, precision: str, name: str, checked: bool) -> Form:
    """Choose the shorter form of a `Sparse`; a stored zero keeps its position in the support."""
    size = math.prod(leaf.shape)
    index, count = leaf.index.detach().cpu().numpy(), leaf.index.numel()
    listed = index.ndim == 1 and index.dtype == np.int64
    ordered = listed and bool((index[1:] > index[:-1]).all())
    if not ordered or (count and not 0 <= index[0] <= index[-1] < size):
        raise WireError(f"{name}: index is not a list of ascending int64 positions below {size}")
    if leaf.value.shape != leaf.index.shape:
        raise WireError(f"{name}: {count} positions for values of shape {tuple(leaf.value.shape)}")
    bits, scale = _bits(leaf.value, size, precision, name, checked)
    boolean = leaf.value.dtype == torch.bool
    zeros = int(np.count_nonzero(bits)) < count
    if boolean and zeros:
        raise WireError(f"{name}: a sparse bool tensor stores False; omit those positions")
    chosen = layout(size, count, 0 if boolean else bits.itemsize, fixed=zeros)
    reals = count if leaf.value.is_floating_point() else 0
    return Form(chosen, size, scale, bits, index, boolean, reals)


def _bits(
    tensor: Tensor, entries: int, precision: str, name: str, checked: bool
) -> tuple[NDArray[Any], bytes]:
    """Return the encoded bits, and the bytes of their scale."""
    if precision == "exact" and not checked:  # the most common case, in a simulation
        return quantization.to_bits(tensor), b""
    short, scale = shortened(tensor, entries, precision, name, checked)
    return quantization.to_bits(short), scale


def shortened(
    tensor: Tensor, entries: int, precision: str, name: str, checked: bool
) -> tuple[Tensor, bytes]:
    """Return a tensor in the dtype in which it is sent, and the bytes of its scale."""
    narrow = quantization.stored(tensor.dtype, entries, precision)
    if (checked or narrow != tensor.dtype) and not quantization.all_finite(tensor):
        raise WireError(f"{name}: holds NaN or infinity; drop this message")
    try:
        return quantization.narrowed(tensor, narrow)
    except ValueError as error:
        raise WireError(f"{name}: {error}; use a precision with a larger range") from error


def padded(shape: tuple[int, ...]) -> int:
    """Return the entries of a shape; a size of zero must not hide strides that overflow."""
    return math.prod(max(size, 1) for size in shape)


class Record(NamedTuple):
    """The record of one tensor, which precedes its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    narrow: torch.dtype
    nonzeros: int
    code: int

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
        scale = quantization.scale_size(self.dtype, self.narrow)
        stored = self.size if self.nonzeros == _DENSE else self.nonzeros
        size = stored * self.narrow.itemsize
        if self.narrow == torch.bool:
            size = -(-self.size // 8) if self.nonzeros == _DENSE else 0
        return self.code, scale, size


def read_record(reader: Reader, spec: Spec, shape: tuple[int, ...], precision: str) -> Record:
    """Read a record and check it against the shape of its tensor."""
    size = math.prod(shape)
    if size >= _MOST_ENTRIES:  # before any arithmetic in floating point
        raise WireError(f"{spec.name}: a shape of 2^{size.bit_length() - 1} entries or more")
    nonzeros = reader.varint(spec.name) - 1
    if nonzeros > size:
        raise WireError(f"{spec.name}: {nonzeros} non-zeros in a tensor of {size} entries")
    coded = nonzeros != _DENSE and not range_coder.is_trivial(size, nonzeros)
    code = reader.varint(spec.name) if coded else 0
    # plus or minus a byte: logarithms may differ in the last bit between machines
    if coded and abs(code - range_coder.length(size, nonzeros)) > 1:
        raise WireError(
            f"{spec.name}: {code} bytes for the positions of {nonzeros} non-zeros among {size}, "
            f"expected {range_coder.length(size, nonzeros)}"
        )
    narrow = quantization.stored(spec.dtype, size, precision)
    return Record(spec.name, spec.dtype, shape, narrow, nonzeros, code)


def read_tensor(reader: Reader, record: Record) -> Tensor:
    """Read a tensor in either form."""
    code, scale, entries = _read(reader, record)
    if record.nonzeros != _DENSE:
        bits = np.zeros(record.size, entries.dtype)
        filled = 0
        for positions in _positions(code, record):
            bits[positions] = entries[filled : filled + positions.size]
            filled += positions.size
        entries = bits
    return _finished(entries, scale, record, record.shape)


def read_sparse(reader: Reader, record: Record) -> Sparse:
    """Read a `Sparse` in either form."""
    code, scale, entries = _read(reader, record)
    if record.nonzeros == _DENSE:
        index = np.flatnonzero(entries)
        entries = entries[index]
    else:
        index = np.empty(record.nonzeros, np.int64)
        filled = 0
        for positions in _positions(code, record):
            index[filled : filled + positions.size] = positions
            filled += positions.size
    value = _finished(entries, scale, record, (index.size,))
    return Sparse(torch.from_numpy(index.astype(np.int64, copy=False)), value, record.shape)


def _read(reader: Reader, record: Record) -> tuple[memoryview, bytes, NDArray[Any]]:
    code_size, scale_size, values_size = record.lengths()
    code = reader.take(code_size, record.name)
    scale = bytes(reader.take(scale_size, record.name))
    data = reader.take(values_size, record.name)
    if record.narrow != torch.bool:
        kind = np.dtype(quantization.bits_dtype(record.narrow))
        return code, scale, np.frombuffer(data, kind).astype(kind.newbyteorder("="))
    if record.nonzeros != _DENSE:
        return code, scale, np.broadcast_to(np.int8(1), record.nonzeros)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[record.size :].any():
        raise WireError(f"{record.name}: bits are set after the last entry")
    return code, scale, bits[: record.size].view(np.int8)


def _positions(code: memoryview, record: Record) -> Iterator[NDArray[np.intp]]:
    try:
        yield from range_coder.decode(code, record.size, record.nonzeros)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from error


def _finished(
    entries: NDArray[Any], scale: bytes, record: Record, shape: tuple[int, ...]
) -> Tensor:
    short = quantization.from_bits(np.require(entries, requirements="W"), record.narrow, shape)
    if not quantization.all_finite(short):
        raise WireError(f"{record.name}: holds NaN or infinity; drop this message")
    try:
        return quantization.widened(short, record.dtype, scale)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from error
