from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl import wire
from parsifl.core import tree, tree_schema
from parsifl.core.errors import WireError
from parsifl.core.leaves import LowRank, Sparse
from parsifl.wire import frame, range_coder, tensor_codec

Forge = Callable[..., bytes]
Hint = dict[str, Tensor]


@dataclass(frozen=True)
class Chain:
    next: Chain | None


@dataclass(frozen=True)
class Settings:
    number: int
    rate: float


def _one(row: Any, leaf: str = "*") -> list[Any]:
    return [{"d": {"w": leaf}}, [row]]


@given(st.integers(0, 2**63 - 1))
def test_numbers_of_63_bits_come_back(number: int) -> None:
    data = frame.varint(number)
    assert frame.Reader(memoryview(data)).varint("n") == number
    assert len(data) == max(1, -(-number.bit_length() // 7))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 8])
def test_numbers_that_stop_early_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="n: 1 bytes are declared, 0 are left"):
        frame.Reader(memoryview(data)).varint("n")


def test_numbers_without_an_end_are_refused() -> None:
    with pytest.raises(WireError, match="n: a number of more than 63 bits"):
        frame.Reader(memoryview(b"\xff" * 100)).varint("n")


def test_a_message_forged_by_hand_from_the_table_is_read(forge: Forge) -> None:
    tensor = torch.tensor([1.5, -2.0])
    payload = tensor.numpy().astype("<f4").tobytes()
    for flags in (0, 4):
        data = forge(_one(["f4", 2]), b"\0" + payload, flags=flags)
        assert torch.equal(wire.decode(data, Hint)["w"], tensor)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data[:0], "prefix"),
        (lambda data: data[:9], "prefix"),
        (lambda data: b"PK" + data[2:], "magic"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version"),
        (lambda data: data[:5] + b"\x08" + data[6:], "flags"),
        (lambda data: data[:-1], "checksum"),
        (lambda data: data + b"\0", "checksum"),
        (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "checksum"),
    ],
)
def test_a_broken_prefix_names_its_field(change: Callable[[bytes], bytes], field: str) -> None:
    data = wire.encode({"w": torch.ones(30)})
    with pytest.raises(WireError, match=f"^{field}"):
        wire.decode(change(data), Hint)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"null",
        b"[]",
        b'[{"d":{}}]',
        b'[{"d":{}},{}]',
        b'[{"d":{}},[],[]]',
        b'[{"d":{}},[]]trailing',
        b'\xff\xfe[{"d":{}},[]]',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"d":' * 50_000,
        b'[{"d":{"w":"*","w":"*"}},[["f4"],["f4"]]]',
        b'[{"d":{"w":{"s":NaN}}},[]]',
        b'[{"d":{"w":{"s":Infinity}}},[]]',
        b'[{"d":{"w":{"s":1e999}}},[]]',
        b'[{"d":{"w":{"s":' + b"9" * 10_000 + b"}}},[]]",
        b'[{"d":{"w":{"s":9223372036854775808}}},[]]',
        b'[{"d":{"w":"*"}},[]]',
        b'[{"d":{"w":"*"}},[["f4"],["f4"]]]',
        b'[{"d":{"w":"?"}},[["f4"]]]',
        b'[{"d":{"w":7}},[["f4"]]]',
        b'[{"d":{"w":"*Sparse"}},[["f4"]]]',
        b'[{"d":{"w":"*","c":1}},[["f4"]]]',
        b'[{"c":"Chain","f":{"next":{"s":null}}},[]]',
        b'[{"d":{"' + b"a" * 2000 + b'":"*"}},[["f4"]]]',
    ],
)
@pytest.mark.parametrize("flags", [0, 4])
def test_hostile_descriptions_are_refused(forge: Forge, text: bytes, flags: int) -> None:
    with pytest.raises(WireError, match=r"^description: "):
        wire.decode(forge(text, flags=flags), Hint)
    with pytest.raises(WireError):
        wire.decode(forge(text, flags=flags), dict[str, Tensor | int])


@pytest.mark.parametrize(
    "row",
    [
        7,
        None,
        [],
        [7],
        [["f4"]],
        ["f3"],
        ["f4", -1],
        ["f4", 1.0],
        ["f4", True],
        ["f4", "2"],
        ["f4", [2]],
        ["f4", *[1] * 33],
        ["f4", 2**62],
        ["f4", 2**40, 2**40],
        ["f4", 0, *[2**62] * 8],
        ["?", 2**32],
    ],
)
def test_rows_that_are_no_shape_or_too_large_name_the_leaf(forge: Forge, row: Any) -> None:
    with pytest.raises(WireError, match=r"^w: "):
        wire.decode(forge(_one(row), b"\x01"), Hint)


@pytest.mark.parametrize(
    "row", [["f4"], ["f4", 1], ["f4", 2**63 - 1, 0, 0], ["f4", 1, 2**20, 2**20]]
)
def test_low_rank_rows_are_checked_too(forge: Forge, row: Any) -> None:
    with pytest.raises(WireError, match=r"^w: "):
        wire.decode(forge(_one(row, "*LowRank"), b"\0\0"), dict[str, LowRank])


def test_a_deflate_bomb_stops_at_the_announced_length() -> None:
    bomb = zlib.compress(bytes(1 << 24))
    for announced in (100, 1 << 20, 1 << 24, 1 << 60):
        body = frame.varint(announced) + frame.varint(len(bomb)) + bomb
        crc = frame.checksum(4, [body])
        data = frame.PREFIX.pack(frame.MAGIC, frame.VERSION, 4, crc) + body
        with pytest.raises(WireError, match=r"^description: "):
            wire.decode(data, Hint)


@pytest.mark.parametrize(
    "short", [b"", b"no deflate", zlib.compress(b"[]")[:-1], zlib.compress(b"[]") + b"x"]
)
def test_damaged_deflate_streams_are_refused(short: bytes) -> None:
    body = frame.varint(2) + frame.varint(len(short)) + short
    data = frame.PREFIX.pack(frame.MAGIC, frame.VERSION, 4, frame.checksum(4, [body])) + body
    with pytest.raises(WireError, match=r"^description: "):
        wire.decode(data, Hint)


def test_recursive_types_do_not_exhaust_the_stack(forge: Forge) -> None:
    def nested(depth: int) -> bytes:
        text = '{"s":null}'
        for _ in range(depth):
            text = '{"c":"Chain","f":{"next":' + text + "}}"
        return f"[{text},[]]".encode()

    assert wire.decode(forge(nested(3)), Chain) == Chain(Chain(Chain(None)))
    for depth in (100, 150, 200, 240, 330, 450):
        with contextlib.suppress(WireError):  # which depth is too much depends on the caller
            wire.decode(forge(nested(depth)), Chain)
    with pytest.raises(WireError, match=r"^description: "):
        wire.decode(forge(nested(5_000)), Chain)


@pytest.mark.parametrize(
    "message",
    [
        Settings(2**63, 1.0),
        Settings(1, float("nan")),
        Settings(1, float("inf")),
        {1: torch.ones(1)},
        {"s": "x" * (1 << 20)},
    ],
)
def test_statics_that_could_not_be_read_back_are_not_sent(message: Any) -> None:
    for function in (wire.encode, wire.size):
        with pytest.raises(WireError, match=r"^description: "):
            function(message)


def test_zero_and_negative_zero_are_one_static() -> None:
    assert wire.encode(Settings(1, -0.0)) == wire.encode(Settings(1, 0.0))


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (tree.Opaque(), "Opaque cannot be sent"),
        (torch.ones(2, device="meta"), "on meta cannot be sent"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.ones([1] * 32), "32 dimensions"),
        (LowRank(torch.ones(3, 2), torch.ones(2, 3), (3, 4)), "factors do not fit"),
        (LowRank(torch.ones(3, 2), torch.ones(3, 4), (3, 4)), "factors do not fit"),
        (LowRank(torch.tensor(1.0), torch.ones(2, 3), (3, 4)), "factors do not fit"),
        (LowRank(torch.ones(1, 1), torch.ones(1, 1), ()), "factors do not fit"),
        (LowRank(torch.ones(3, 2), torch.ones(2, 4).double(), (3, 4)), "differ in dtype"),
        (Sparse(torch.ones(1, device="meta"), torch.ones(1), (2,)), "on meta"),
    ],
)
def test_leaves_that_cannot_travel_are_named(leaf: Any, text: str) -> None:
    for function in (wire.encode, wire.size):
        with pytest.raises(WireError, match=rf"^a\.1: .*{text}"):
            function({"a": (torch.ones(1), leaf)})


def test_names_beyond_reason_are_not_sent() -> None:
    wire.decode(wire.encode({"a" * 1000: torch.ones(1)}), Hint)
    with pytest.raises(WireError, match="a name of 1001 characters"):
        wire.encode({"a" * 1001: torch.ones(1)})


def test_repetitive_descriptions_are_deflated_and_short_ones_are_not() -> None:
    many = {f"layer{i}.block.weight": torch.ones(1) for i in range(100)}
    plain = len(json.dumps([tree_schema.to_json(tree.structure(many)), [["f4", 1]] * 100]))
    assert wire.size(many) - wire.dense_size(many) < plain / 4
    assert wire.encode({"w": torch.ones(1)})[5] == 0
    assert wire.encode(many)[5] == frame.DEFLATED


def test_bytes_after_a_deflated_description_are_rejected(
    sealed: Callable[[bytes], bytes],
) -> None:
    text = json.dumps(_one(["f4", 1])).encode()
    for extra in (b"", b"x"):
        short = zlib.compress(text) + extra
        body = frame.varint(len(text)) + frame.varint(len(short)) + short + b"\0" + bytes(4)
        data = sealed(b"PSFL" + bytes([frame.VERSION, frame.DEFLATED]) + bytes(4) + body)
        if extra:
            with pytest.raises(WireError, match="description: does not inflate"):
                wire.decode(data, Hint)
        else:
            assert wire.decode(data, Hint)["w"].tolist() == [0.0]


def test_a_description_of_too_many_leaves_is_rejected_before_it_is_built(forge: Forge) -> None:
    count = 2 * frame.MOST_NODES
    message = {str(i): torch.zeros(1) for i in range(count)}
    with pytest.raises(WireError, match=f"at most {frame.MOST_NODES}"):
        wire.encode(message)
    leaves = [{"d": dict.fromkeys(message, "*")}, [["f4", 1]] * count]
    statics = [{"u": [{"s": 1}] * count}, []]
    for description in (leaves, statics):
        with pytest.raises(WireError, match=f"description: .* at most {frame.MOST_NODES}"):
            wire.decode(forge(description, flags=4), Any)


@pytest.mark.parametrize("change", [-8, -2, 2, 8])
def test_a_support_of_another_length_is_rejected(
    change: int, sealed: Callable[[bytes], bytes]
) -> None:
    tensor = torch.zeros(4000)
    tensor[::40] = 1.0
    data = wire.encode({"w": tensor})
    layout = tensor_codec.layout(4000, 100, 4)
    length = range_coder.length(4000, 100)
    start = data.index(layout.record)
    record = frame.varint(101) + frame.varint(length + change)
    rest = data[start + len(layout.record) :]
    support, values = rest[:length], rest[length:]
    support = support[: length + change].ljust(length + change, b"\0")
    forged = sealed(data[:start] + record + support + values)
    with pytest.raises(WireError, match="bytes for the positions of 100 non-zeros among 4000"):
        wire.decode(forged, Hint)
