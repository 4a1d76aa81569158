from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import WireError
from parsifl.core.leaves import Sparse
from parsifl.wire import range_coder

Forge = Callable[..., bytes]


def _decode(forge: Forge, row: Any, tail: bytes, hint: Any = Tensor, flags: int = 0) -> Any:
    leaf = "*Sparse" if hint is Sparse else "*"
    return wire.decode(forge([leaf, [row]], tail, flags=flags), hint)


@pytest.mark.parametrize("hint", [Tensor, Sparse])
@pytest.mark.parametrize(
    ("row", "tail", "text"),
    [
        (["f4", 2], b"", "1 bytes are declared, 0 are left"),
        (["f4", 2], b"\x04", "3 non-zeros in a tensor of 2 entries"),
        (["f4", 2], b"\x00" + bytes(7), "length: 7 bytes of tensors, the records announce 8"),
        (["f4", 2], b"\x00" + bytes(9), "length: 9 bytes of tensors, the records announce 8"),
        (["f4", 2], b"\x02", "1 bytes are declared, 0 are left"),
        (["f4", 2], b"\x02\x01" + bytes(4), "length: 4 bytes of tensors, the records announce 5"),
        (["f4", 2], b"\x02\x01\x00" + bytes(4), "support does not code 1 of 2"),
        (["f4", 2], b"\x02\x01\x41" + bytes(4), "support does not code 1 of 2"),
        (["f4", 2], b"\x02\x01\xc0" + bytes(4), "support does not code 1 of 2"),
        (["f4", 1000], b"\x65\x3b" + b"\xff" * 59 + bytes(400), "beyond the last symbol"),
        (["f4", 2], b"\x02\x10" + b"\xff" * 16 + bytes(4), "16 bytes for the positions of 1 non"),
        (["f4", 2], b"\x02\x00" + bytes(4), "support does not code 1 of 2"),
        (["f4", 2], b"\x02" + b"\xff" * 8 + b"\x7f", "among 2, expected 1"),
        (["f4", 2], b"\x02\x02\x00", "the records announce"),
        # 51 bytes that would take a second to read
        (["?", 2**25], b"\x81\x80\x80\x08\x04" + bytes(4), "4 bytes for the positions of 16777216"),
        (["f4", 2], b"\x00" + np.array([1, np.nan], "<f4").tobytes(), "holds NaN"),
        (["f4", 2], b"\x03" + np.array([1, -np.inf], "<f4").tobytes(), "holds NaN"),
        (["b2", 2], b"\x00" + b"\x80\x7f\x00\x00", "holds NaN"),
        (["?", 3], b"\x00\x08", "bits are set after the last entry"),
        (["f4", 1000], b"\x01\x00", "length: 1 bytes"),
    ],
)
def test_forged_records_and_payloads_are_refused(
    forge: Forge, row: Any, tail: bytes, text: str, hint: Any
) -> None:
    with pytest.raises(WireError, match=text):
        _decode(forge, row, tail, hint)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_forged_scale_is_refused(forge: Forge, scale: float) -> None:
    tail = b"\x00" + np.float32(scale).tobytes() + bytes(100)
    with pytest.raises(WireError, match=r"\(root\): scale is"):
        _decode(forge, ["f4", 100], tail, flags=3)


@pytest.mark.parametrize(("code", "place"), [(b"\x40", 0), (b"\x80", 1)])
def test_a_support_written_by_hand_is_read(forge: Forge, code: bytes, place: int) -> None:
    # quarters of the unit interval: 00, 10, 01, 11
    tail = b"\x02\x01" + code + np.float32(1.5).tobytes()
    found = _decode(forge, ["f4", 2], tail)
    assert found.tolist() == [1.5 * (place == 0), 1.5 * (place == 1)]


def test_a_forged_support_with_another_count_is_refused(forge: Forge) -> None:
    mask = np.arange(1000) % 3 == 0
    code = range_coder.encode(mask, 334)
    good = b"\xcf\x02" + bytes([len(code)]) + code + np.ones(334, np.float32).tobytes()
    assert int(_decode(forge, ["f4", 1000], good).sum()) == 334
    bad = b"\xd0\x02" + bytes([len(code)]) + code + np.ones(335, np.float32).tobytes()
    with pytest.raises(WireError, match="support does not code 335"):
        _decode(forge, ["f4", 1000], bad)


def test_sizes_within_the_limit_but_beyond_the_machine_are_wire_errors(forge: Forge) -> None:
    data = forge(["*", [["f8", 2**58]]], b"\x01")
    with pytest.raises(WireError, match=r"^memory: "):
        wire.decode(data, Tensor, limit=2**62)


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        ([0, 0], [1.0, 2.0], "ascending"),
        ([3, 2], [1.0, 2.0], "ascending"),
        ([-1, 2], [1.0, 2.0], "ascending"),
        ([0, 9], [1.0, 2.0], "ascending"),
        ([[0, 1]], [[1.0, 2.0]], "ascending"),
        ([0, 1], [1.0], "2 positions for values of shape"),
    ],
)
def test_sparse_leaves_must_be_well_formed(index: Any, value: Any, text: str) -> None:
    with pytest.raises(WireError, match=rf"^s: .*{text}"):
        wire.size({"s": Sparse(torch.tensor(index), torch.tensor(value), (9,))})


def test_positions_must_be_int64() -> None:
    with pytest.raises(WireError, match="int64"):
        wire.encode(Sparse(torch.tensor([1], dtype=torch.int32), torch.ones(1), (9,)))


def test_a_sparse_bool_may_not_store_false() -> None:
    with pytest.raises(WireError, match="stores False"):
        wire.encode(Sparse(torch.tensor([1, 2]), torch.tensor([True, False]), (9,)))


@pytest.mark.parametrize("count", [0, 1, 500, 995, 1000])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bool])
def test_sparse_comes_back_sparse_in_either_form(count: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(count)
    index = torch.randperm(1000, generator=draw)[:count].sort().values
    message = Sparse(index, torch.ones(count).to(dtype), (10, 100))
    data = wire.encode(message)
    assert tree.same(wire.decode(data, Sparse), message)
    assert len(data) <= wire.dense_size(message) + 40


@pytest.mark.parametrize("zeros", [1, 10])
def test_a_few_zeros_among_millions_are_not_coded(
    zeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(range_coder, "encode")
    tensor = torch.ones(2_000_000)
    tensor[:zeros] = 0.0
    assert 8_000_000 < wire.size(tensor) < 8_000_100


def test_an_almost_full_sparse_of_bytes_travels_dense() -> None:
    index = torch.cat([torch.arange(50_000), torch.arange(50_001, 100_000)])
    sparse = Sparse(index, torch.ones(99_999, dtype=torch.int8), (100_000,))
    assert wire.size(sparse) <= 100_000 + 40
