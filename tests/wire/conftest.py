from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

Forge = Callable[..., bytes]


def _varint(number: int) -> bytes:
    head = b""
    while number >= 128:
        head += bytes([number % 128 + 128])
        number //= 128
    return head + bytes([number])


def _forge(description: Any, tail: bytes = b"", *, flags: int = 0, version: int = 2) -> bytes:
    """Build a message by hand, with a right checksum, from the table in the docstring."""
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    if flags & 4:
        short = zlib.compress(text)
        body = _varint(len(text)) + _varint(len(short)) + short + tail
    else:
        body = _varint(len(text)) + text + tail
    head = b"PSFL" + bytes([version, flags])
    crc = zlib.crc32(body, zlib.crc32(head + bytes(4)))
    return head + struct.pack("<I", crc) + body


@pytest.fixture(scope="session")
def forge() -> Forge:
    return _forge


@pytest.fixture(scope="session")
def sealed() -> Callable[[bytes], bytes]:
    """Give a message (however mutated) the checksum that it claims to have."""

    def seal(data: bytes) -> bytes:
        crc = zlib.crc32(data[10:], zlib.crc32(data[:6] + bytes(4)))
        return data[:6] + struct.pack("<I", crc) + data[10:]

    return seal
