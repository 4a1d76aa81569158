from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.data.rdata import read_rdata

NIL = struct.pack(">i", 254)


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}i", *values)


def characters(text: str) -> bytes:
    return words(9, len(text)) + text.encode()


def symbol(text: str) -> bytes:
    return words(1) + characters(text)


def matrix(values: list[float], shape: tuple[int, int], dim: bytes) -> bytes:
    head = words(14 | 1 << 9, len(values)) + struct.pack(f">{len(values)}d", *values)
    return head + words(2 | 1 << 10) + dim + words(13, 2, *shape) + NIL


def pair(tag: bytes, value: bytes) -> bytes:
    return words(2 | 1 << 10) + tag + value


def content(version: int = 2) -> bytes:
    """Return two matrices that share the symbol `dim`, strings, integers, a list, and a NULL."""
    head = b"RDX%d\nX\n" % version + words(version, 0x020F00, 0x020300)
    if version == 3:
        head += words(5) + b"UTF-8"
    reference = words(255 | 2 << 8)  # `dim` is the second symbol in the file
    return (
        head
        + pair(symbol("a"), matrix([1, 2, 3, 4, 5, 6], (2, 3), symbol("dim")))
        + pair(symbol("b"), matrix([7, 8], (1, 2), reference))
        + pair(symbol("s"), words(16, 2) + characters("x") + words(9, -1))
        + pair(symbol("i"), words(13, 2, 5, -6))
        + pair(symbol("l"), words(19, 2) + words(10, 1, 1) + NIL)
        + NIL
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_plain_values_are_read(
    tmp_path: Path, pack: Callable[[bytes], bytes], version: int
) -> None:
    (tmp_path / "a.RData").write_bytes(pack(content(version)))
    values = read_rdata(tmp_path / "a.RData")
    assert values["a"].tolist() == [[1, 3, 5], [2, 4, 6]]  # columns first
    assert values["b"].tolist() == [[7, 8]]
    assert values["s"].tolist() == ["x", None]
    assert values["i"].tolist() == [5, -6]
    assert values["l"][0].tolist() == [1]
    assert values["l"][1] is None


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"RDA2\nA\n", "not an RData file"),
        (content()[:60], "ends too early"),
        (b"RDX2\nX\n" + words(2, 0, 0, 13, 1, 4), "no named variables"),
        (b"RDX2\nX\n" + words(2, 0, 0) + pair(symbol("f"), words(3)), "type 3 cannot be read"),
        (b"RDX2\nX\n" + words(2, 0, 0) + pair(symbol("f"), words(14, -1)), "ends too early"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, written: bytes, message: str) -> None:
    (tmp_path / "a.RData").write_bytes(written)
    with pytest.raises(DataError, match=message):
        read_rdata(tmp_path / "a.RData")


def test_the_real_genes_are_finite(real: Path) -> None:
    values = read_rdata(real / "golub-leukemia/golub.RData")
    assert values["golub"].shape == (3051, 38)
    assert np.isfinite(values["golub"]).all()
