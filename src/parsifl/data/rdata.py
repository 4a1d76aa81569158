"""Reads the part of R's serialised format that plain matrices and vectors need (XDR, version 2, 3).

The format is described in "R Internals", section "Serialization Formats". Closures, environments
and the like raise an error with their type number: nothing in a file is ever executed.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from pathlib import Path
from typing import Any

import numpy as np

from parsifl.core.errors import DataError
from parsifl.data.ragged import Array

_NIL, _REFERENCE = 254, 255
_SYMBOL, _PAIRS, _CHARACTERS, _LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST = (
    1,
    2,
    9,
    10,
    13,
    14,
    16,
    19,
)
_HAS_ATTRIBUTES, _HAS_TAG = 1 << 9, 1 << 10
_OPENERS = (
    (b"\xfd7zXZ", lzma.decompress),
    (b"\x1f\x8b", gzip.decompress),
    (b"BZh", bz2.decompress),
)


def read_rdata(path: Path) -> dict[str, Any]:
    """Return the variables of an .RData file: arrays (matrices in their shape) and lists."""
    content = path.read_bytes()
    for magic, decompress in _OPENERS:
        if content.startswith(magic):
            content = decompress(content)
            break
    if not content.startswith((b"RDX2\nX\n", b"RDX3\nX\n")):
        raise DataError(f"{path} is not an RData file in binary form")
    reader = _Reader(content, position=7)
    version = reader.integer()
    reader.position += 8  # the versions of R that wrote it and that can read it
    if version >= 3:
        reader.take(reader.integer())  # native encoding
    try:
        variables = reader.item()
    except struct.error as error:
        raise DataError(f"{path} ends too early") from error
    if not isinstance(variables, dict):
        raise DataError(f"{path} holds no named variables")
    return variables


class _Reader:
    """A cursor over the bytes, and the table of symbols that were seen."""

    def __init__(self, content: bytes, position: int) -> None:
        self.content, self.position = content, position
        self.symbols: list[str] = []

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > len(self.content):
            raise struct.error
        return self.content[start : self.position]

    def integer(self) -> int:
        value: int = struct.unpack(">i", self.take(4))[0]
        return value

    def item(self) -> Any:
        flags = self.integer()
        kind = flags & 0xFF
        if kind == _NIL:
            return None
        if kind == _REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == _CHARACTERS:
            length = self.integer()
            return None if length < 0 else self.take(length).decode("utf-8", "replace")
        if kind == _PAIRS:
            return self._pairs(flags)
        value = self._vector(kind)
        attributes = self.item() if flags & _HAS_ATTRIBUTES else None
        return _shaped(value, attributes)

    def _pairs(self, flags: int) -> dict[str, Any]:
        """Read a linked list of tagged values."""
        pairs: dict[str, Any] = {}
        while flags & 0xFF == _PAIRS:
            if flags & _HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & _HAS_TAG else str(len(pairs))
            pairs[tag] = self.item()
            flags = self.integer()
        return pairs

    def _vector(self, kind: int) -> Any:
        if kind not in (_LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST):
            raise DataError(f"RData: values of type {kind} cannot be read, only plain vectors")
        length = self.integer()
        if kind == _REAL:
            return np.frombuffer(self.take(8 * length), ">f8").astype(np.float64)
        if kind in (_LOGICAL, _INTEGER):
            return np.frombuffer(self.take(4 * length), ">i4").astype(np.int64)
        items = [self.item() for _ in range(length)]
        return np.array(items, dtype=object) if kind == _STRINGS else items


def _shaped(value: Any, attributes: Any) -> Any:
    if isinstance(value, np.ndarray) and isinstance(attributes, dict) and "dim" in attributes:
        shape: Array = attributes["dim"]
        return value.reshape(shape, order="F")  # R stores columns first
    return value
