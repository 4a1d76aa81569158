"""Encode, decode and measure whole messages."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.config import Precision
from parsifl.core.errors import WireError
from parsifl.core.leaves import UNITS, LowRank, Sparse
from parsifl.wire import frame, quantization, tensor_codec
from parsifl.wire.message_size import MessageStats, dense_leaves

T = TypeVar("T")
LIMIT = 1 << 31
_FREE, _PER_BYTE = 1 << 23, 1 << 11


def encode(message: Any, precision: Precision = "exact") -> bytes:
    """Turn a message tree into bytes, each leaf in its shortest form.

    >>> import torch
    >>> data = encode({"w": torch.eye(3)})
    >>> decode(data, dict[str, Tensor])["w"].trace()
    tensor(3.)
    """
    leaves, structure = tree.flatten(message, units=UNITS)
    names, flag, head = _described(leaves, structure)
    flags = quantization.precision_index(precision) | flag
    parts = _forms(leaves, names, precision, checked=True)
    pieces: list[Any] = [head, *(part.layout.record for part in parts)]
    for part in parts:
        try:
            pieces.extend(part.pieces())
        except (MemoryError, OverflowError, ValueError) as error:
            raise WireError(
                f"memory: too little to code {part.size} entries: each takes at least one byte, "
                "zeros too"
            ) from error
    crc = frame.checksum(flags, pieces)
    return b"".join([frame.PREFIX.pack(frame.MAGIC, frame.VERSION, flags, crc), *pieces])


def size(message: Any, precision: Precision = "exact") -> int:
    """Return the length of `encode(message, precision)` without coding anything.

    >>> import torch
    >>> size({"w": torch.eye(3)}) == len(encode({"w": torch.eye(3)}))
    True
    """
    return measure(message, precision).bytes


def measure(message: Any, precision: Precision = "exact") -> MessageStats:
    """Return the size of a message in one pass over its values."""
    leaves, structure = tree.flatten(message, units=UNITS)
    mark = (precision, structure, *[_mark(leaf, precision) for leaf in leaves])
    stats = _kept.get(mark)
    if stats is None:
        stats = _measured(leaves, structure, precision)
        if None not in mark:  # the clients of a round send messages of the same structure
            if len(_kept) >= _KEPT:
                _kept.clear()
            _kept[mark] = stats
    return stats


_KEPT = 256
_kept: dict[Any, MessageStats] = {}


def _mark(leaf: Any, precision: str) -> Any:
    """Return what determines the encoding of an ordinary tensor; None for other leaves."""
    plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_meta
    if not plain or precision != "exact" or leaf.dtype not in quantization.CODES:
        return None
    return leaf.dtype, leaf.shape, quantization.count_nonzero(leaf)


def _measured(leaves: list[Any], structure: tree.Structure, precision: str) -> MessageStats:
    quantization.precision_index(precision)
    names, _, head = _described(leaves, structure)
    length, information, reals = frame.PREFIX.size + len(head), 0.0, 0
    for part in _forms(leaves, names, precision, checked=False):
        length += part.length()
        information += part.layout.information
        reals += part.reals
    return MessageStats(length, dense_leaves(leaves), information, reals)


def _forms(
    leaves: list[Any], names: list[str], precision: str, checked: bool
) -> list[tensor_codec.Form]:
    forms: list[tensor_codec.Form] = []
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, Sparse):
            forms.append(tensor_codec.of_sparse(leaf, precision, name, checked))
        else:
            tensors = _tensors(leaf)
            forms.extend([tensor_codec.of_tensor(t, precision, name, checked) for t in tensors])
    return forms


def _described(leaves: list[Any], structure: tree.Structure) -> tuple[list[str], int, bytes]:
    """Return the names of leaves, and the flag and the bytes of their description."""
    names = tree.names(structure)
    named = zip(leaves, names, strict=True)
    rows = tuple([frame.spec_of(leaf, name).row() for leaf, name in named])
    return names, *frame.description(structure, rows)


def _tensors(leaf: Any) -> tuple[Tensor, ...]:
    return (leaf.left, leaf.right) if isinstance(leaf, LowRank) else (leaf,)


def decode(data: bytes, hint: Any, limit: int | None = None) -> Any:
    """Read an untrusted message of the type `hint`.

    Parameters
    ----------
    data
        Output of `encode`, possibly damaged or forged.
    hint
        The type of the message, such as `dict[str, Tensor]` or a frozen dataclass.
    limit
        Maximum bytes of memory of the tensors, both as sent and dense (a `LowRank`
        counts as the tensor that it represents). It is checked before any tensor is allocated.
        None: 2 GiB, and at most 8 million entries plus 2,048 per byte of the message, because
        zeros cost time and memory but no bytes. Pass a limit for messages sparser than that.

    Raises
    ------
    WireError
        If the bytes are invalid; the error names the field.
    """
    reader = frame.Reader(memoryview(data))
    flags = frame.read_prefix(reader)
    structure, specs = frame.read_description(reader, flags, hint)
    announced = [_announced(reader, spec, quantization.PRECISIONS[flags & 3]) for spec in specs]
    # zeros cost no bytes, but time and memory
    entries = _FREE + _PER_BYTE * len(data) if limit is None else math.inf
    _check_sizes(reader, announced, LIMIT if limit is None else limit, entries)
    try:
        leaves = [_leaf(reader, *entry) for entry in announced]
    except MemoryError as error:
        raise WireError("memory: too little for a message of this size; lower `limit`") from error
    try:
        return tree.unflatten(leaves, structure)
    except Exception as error:  # the message's own class may check its fields in __post_init__
        raise WireError(f"(root): the fields were rejected: {error}") from error


_Announced = tuple[frame.Spec, list[tensor_codec.Record]]


def _announced(reader: frame.Reader, spec: frame.Spec, precision: str) -> _Announced:
    shapes = spec.parts()
    return spec, [tensor_codec.read_record(reader, spec, shape, precision) for shape in shapes]


def _check_sizes(
    reader: frame.Reader, announced: list[_Announced], limit: int, entries: float
) -> None:
    total = needed = count = 0
    for spec, records in announced:
        held = sum(record.held(spec.kind is Sparse) for record in records)
        # the tensor that the factors represent counts too
        total += max(held, tensor_codec.padded(spec.shape) * spec.dtype.itemsize)
        needed += sum(sum(record.lengths()) for record in records)
        if total > limit:
            raise WireError(
                f"{spec.name}: shape {spec.shape} brings the message to {total} bytes, above the "
                f"limit of {limit}; raise `limit` if this is intended"
            )
        count += tensor_codec.padded(spec.shape)
        if count > entries:
            raise WireError(
                f"{spec.name}: shape {spec.shape} brings the message to {count} entries, too many "
                f"for {len(reader.data)} bytes; pass a `limit` if this is intended"
            )
    left = len(reader.data) - reader.at
    if left != needed:
        raise WireError(f"length: {left} bytes of tensors, the records announce {needed}")


def _leaf(reader: frame.Reader, spec: frame.Spec, records: list[tensor_codec.Record]) -> Any:
    if spec.kind is Sparse:
        return tensor_codec.read_sparse(reader, records[0])
    first, *rest = (tensor_codec.read_tensor(reader, record) for record in records)
    return LowRank(first, rest[0], spec.shape) if spec.kind is LowRank else first


def as_received(message: T, precision: Precision) -> T:
    """Return a message as received: equal to `decode(encode(message, precision))`.

    >>> import torch
    >>> as_received({"w": torch.tensor([1.0, 1.001])}, "bfloat16")["w"]
    tensor([1., 1.])
    """
    if quantization.precision_index(precision) == 0:
        return message
    leaves, structure = tree.flatten(message, units=UNITS)
    named = zip(leaves, tree.names(structure), strict=True)
    result: T = tree.unflatten([_rounded(leaf, precision, n) for leaf, n in named], structure)
    return result


def _rounded(leaf: Any, precision: str, name: str) -> Any:
    if isinstance(leaf, LowRank):
        left, right = (_round(part, part.numel(), precision, name) for part in _tensors(leaf))
        return LowRank(left, right, leaf.shape)
    if isinstance(leaf, Sparse):
        value = _round(leaf.value, math.prod(leaf.shape), precision, name)
        return Sparse(leaf.index, value, leaf.shape)
    return _round(leaf, leaf.numel(), precision, name)


def _round(tensor: Tensor, entries: int, precision: str, name: str) -> Tensor:
    short, scale = tensor_codec.shortened(tensor, entries, precision, name, checked=False)
    return quantization.widened(short, tensor.dtype, scale)
