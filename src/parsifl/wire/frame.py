"""The frame of a message: fixed prefix, description of the tree, and a validating reader.

=========  =======================================================================
bytes      what
=========  =======================================================================
4          magic `PSFL`
1          version
1          flags: precision (bits 0 and 1), description is deflated (bit 2)
4          CRC-32 of everything else
varint     length of the description as JSON
varint     only if deflated: its length in this message
...        description: `[structure, [[dtype, *shape], ...]]`, a row for each leaf
...        a record for each tensor: 0 = dense, or non-zeros + 1 (and bytes of the support)
...        for each tensor: support, scale, values
=========  =======================================================================
"""

from __future__ import annotations

import functools
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsifl.core import tree, tree_schema
from parsifl.core.errors import WireError
from parsifl.core.leaves import UNITS, LowRank, Sparse, matrix_shape
from parsifl.wire.quantization import CODES, DTYPES, PRECISIONS

MAGIC = b"PSFL"
VERSION = 2
PREFIX = struct.Struct("<4sBBI")
DEFLATED = 4
DESCRIPTION_LIMIT = 1 << 20
"""Maximum bytes of JSON in a message; ResNet-18 needs five thousand."""
MOST_NODES = 10_000
"""Maximum number of leaves and containers of a message; ResNet-18 has 63."""
DIMENSIONS = 32

Row = tuple[str | int, ...]

_WORD = 1 << 63


class Spec(NamedTuple):
    """The description of a leaf; `rank` is -1 unless it is a `LowRank`."""

    name: str
    kind: type
    dtype: torch.dtype
    shape: tuple[int, ...]
    rank: int = -1

    def parts(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that are sent for this leaf."""
        if self.rank < 0:
            return [self.shape]
        rows, columns = matrix_shape(self.shape)
        return [(rows, self.rank), (self.rank, columns)]

    def row(self) -> Row:
        """Return the row of the description."""
        rank = () if self.rank < 0 else (self.rank,)
        return (CODES[self.dtype], *rank, *self.shape)


def varint(number: int) -> bytes:
    """Write a non-negative number, seven bits per byte, lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    output = bytearray()
    while number > 127:
        output.append(number & 127 | 128)
        number >>= 7
    output.append(number)
    return bytes(output)


class Reader:
    """Reads a message from the front; missing bytes raise a `WireError`."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int, name: str) -> memoryview:
        """Return the next bytes."""
        if count > len(self.data) - self.at:
            raise WireError(
                f"{name}: {count} bytes are declared, {len(self.data) - self.at} are left; "
                "the message is truncated or damaged"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self, name: str) -> int:
        """Read what `varint` wrote."""
        number = 0
        for shift in range(0, 63, 7):
            byte = self.take(1, name)[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise WireError(f"{name}: a number of more than 63 bits; the message is damaged")


def checksum(flags: int, pieces: Iterable[Any]) -> int:
    """Return the CRC-32 of the prefix and all pieces after it."""
    total = zlib.crc32(PREFIX.pack(MAGIC, VERSION, flags, 0))
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def read_prefix(reader: Reader) -> int:
    """Check magic, version, flags and checksum; return the flags."""
    magic, version, flags, announced = PREFIX.unpack(reader.take(PREFIX.size, "prefix"))
    if magic != MAGIC:
        raise WireError(f"magic: {magic!r} is not {MAGIC!r}; not a Parsifl message")
    if version != VERSION:
        raise WireError(
            f"version: message has {version}, this is {VERSION}; use one release everywhere"
        )
    if flags >= len(PRECISIONS) + DEFLATED:
        raise WireError(f"flags: {flags} is unknown; the message is damaged")
    if checksum(flags, [reader.data[reader.at :]]) != announced:
        raise WireError("checksum: bytes were changed in transit; send the message again")
    return int(flags)


@functools.lru_cache(maxsize=256)
def description(structure: tree.Structure, rows: tuple[Row, ...]) -> tuple[int, bytes]:
    """Return the flag and the bytes of a description; cached, because rounds repeat them."""
    content = [tree_schema.to_json(structure), [list(row) for row in rows]]
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        _check_nodes(text)
        readable = len(text) <= DESCRIPTION_LIMIT and _parse(text) == content
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"description: {error}") from error
    if not readable:
        raise WireError(
            f"description: {len(text)} bytes of names and statics cannot be read back; expected "
            f"string keys and at most {DESCRIPTION_LIMIT} bytes"
        )
    short = zlib.compress(text, 9)
    packed = varint(len(text)) + varint(len(short)) + short
    plain = varint(len(text)) + text
    return (DEFLATED, packed) if len(packed) < len(plain) else (0, plain)


def read_description(reader: Reader, flags: int, hint: Any) -> tuple[tree.Structure, list[Spec]]:
    """Read structure and leaves; classes come from the hint."""
    text = _text(reader, bool(flags & DEFLATED))
    try:
        _check_nodes(text)
        content = _parse(text)
        if not isinstance(content, list) or len(content) != 2 or not isinstance(content[1], list):
            raise ValueError("expected [structure, leaves]")
        structure = tree_schema.from_json(content[0], hint, units=UNITS)
        names, kinds, rows = tree.names(structure), tree.kinds(structure), content[1]
    except (ValueError, RecursionError) as error:
        raise WireError(f"description: {error}") from error
    if len(rows) != len(names):
        raise WireError(f"description: {len(rows)} rows for {len(names)} leaves")
    entries = zip(rows, kinds, names, strict=True)
    return structure, [_read_row(row, kind, name) for row, kind, name in entries]


def _text(reader: Reader, deflated: bool) -> bytes:
    length = reader.varint("description")
    if length > DESCRIPTION_LIMIT:
        raise WireError(f"description: {length} bytes, at most {DESCRIPTION_LIMIT} are read")
    if not deflated:
        return bytes(reader.take(length, "description"))
    inflater = zlib.decompressobj()
    short = reader.take(reader.varint("description"), "description")
    try:
        text = inflater.decompress(short, length + 1)
    except zlib.error as error:
        raise WireError(f"description: {error}") from error
    if len(text) != length or not inflater.eof or inflater.unused_data:
        raise WireError(f"description: does not inflate to the {length} bytes declared")
    return text


def _check_nodes(text: bytes) -> None:
    """Bound the work of reading a description: its cost grows with its nodes, not its bytes."""
    nodes = text.count(b"{") + text.count(b'"*')  # containers and statics, and leaves
    if nodes > MOST_NODES:
        raise ValueError(f"{nodes} leaves and containers, at most {MOST_NODES} are read")


def _parse(text: bytes) -> Any:
    """Read strict JSON: no NaN, no infinity, no double keys, no integer beyond 64 bits."""
    return json.loads(
        text.decode("ascii"),
        object_pairs_hook=_object,
        parse_int=_integer,
        parse_float=_float,
        parse_constant=_float,
    )


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError(f"a key is given twice among {[key for key, _ in pairs][:5]}")
    return members


def _integer(text: str) -> int:
    number = int(text) if len(text) <= 20 else _WORD
    if not -_WORD <= number < _WORD:
        raise ValueError(f"integer {text[:20]} does not fit in 64 bits")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _read_row(row: Any, kind: type, name: str) -> Spec:
    if not isinstance(row, list) or not row or not isinstance(row[0], str) or row[0] not in DTYPES:
        raise WireError(f"{name}: row of the description does not begin with a dtype")
    sizes = row[1:]
    if any(type(size) is not int or size < 0 for size in sizes) or len(sizes) > DIMENSIONS:
        raise WireError(f"{name}: shape {sizes[:DIMENSIONS]} is not a list of sizes")
    if kind is not LowRank:
        return Spec(name, kind, DTYPES[row[0]], tuple(sizes))
    if len(sizes) < 2:
        raise WireError(f"{name}: a low-rank leaf needs its rank and at least one size")
    return Spec(name, kind, DTYPES[row[0]], tuple(sizes[1:]), sizes[0])


def spec_of(leaf: Any, name: str) -> Spec:
    """Describe a leaf to be sent; unsupported leaves raise a `WireError`."""
    if isinstance(leaf, LowRank):
        tensors, rank = [leaf.left, leaf.right], leaf.left.shape[-1] if leaf.left.ndim else 0
    elif isinstance(leaf, Sparse):
        tensors, rank = [leaf.value, leaf.index], -1
    elif isinstance(leaf, Tensor):
        tensors, rank = [leaf], -1
    else:
        raise WireError(f"{name}: {type(leaf).__qualname__} cannot be sent; expected a tensor")
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in CODES:
            raise WireError(
                f"{name}: {tensor.layout} {tensor.dtype} on {tensor.device} cannot be sent"
            )
    spec = Spec(name, type(leaf), tensors[0].dtype, tuple(leaf.shape), rank)
    if len(name) > tree_schema.LONGEST_NAME:
        raise WireError(
            f"{name[:40]}...: a name of {len(name)} characters, at most "
            f"{tree_schema.LONGEST_NAME} are allowed"
        )
    if len(spec.shape) >= DIMENSIONS:
        raise WireError(f"{name}: {len(spec.shape)} dimensions, at most {DIMENSIONS - 1} allowed")
    if isinstance(leaf, LowRank) and not _fits(leaf, spec):
        raise WireError(f"{name}: factors do not fit the shape {leaf.shape}, or differ in dtype")
    return spec


def _fits(leaf: LowRank, spec: Spec) -> bool:
    shapes = [tuple(leaf.left.shape), tuple(leaf.right.shape)]
    return bool(leaf.shape) and spec.parts() == shapes and leaf.left.dtype == leaf.right.dtype
