from __future__ import annotations

import json
import math
import sys
import time
import timeit
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import ConfigError, WireError
from parsifl.core.leaves import LowRank, Sparse
from parsifl.wire import frame, quantization

PRECISIONS = list(wire.PRECISIONS)


@dataclass(frozen=True)
class Pair:
    params: dict[str, Tensor | Sparse | LowRank]
    width: float
    trained: tuple[str, ...] = ()
    mode: Literal["a", "b"] | None = None

    def __post_init__(self) -> None:
        if self.width < 0:
            raise RuntimeError("width is negative")


def _tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...], density: float) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand(shape, generator=draw) < density
    dense = (torch.randn(shape, generator=draw, dtype=torch.float64) * 40).to(dtype)
    return torch.where(keep, dense, torch.zeros((), dtype=dtype))


tensors = st.builds(
    _tensor,
    st.integers(0, 1000),
    st.sampled_from(list(quantization.CODES)),
    st.lists(st.sampled_from([0, 1, 2, 7, 30]), max_size=3).map(tuple),
    st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
)


def _sparse(tensor: Tensor, stored_zeros: bool) -> Sparse:
    flat = tensor.reshape(-1)
    index = flat.nonzero().reshape(-1)
    value = flat[index]
    if stored_zeros and value.dtype != torch.bool:
        value = torch.where(torch.arange(value.numel()) % 3 == 0, torch.zeros_like(value), value)
    return Sparse(index, value, tuple(tensor.shape))


sparse = st.builds(_sparse, tensors, st.booleans())
low_rank = st.builds(
    lambda seed, rank, sizes, density: LowRank(
        _tensor(seed, torch.float32, (sizes[0] * sizes[2], rank), density),
        _tensor(seed + 1, torch.float32, (rank, sizes[1] * sizes[3]), density),
        tuple(sizes),
    ),
    st.integers(0, 1000),
    st.integers(0, 5),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.sampled_from([0.1, 1.0]),
)
statics = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
messages = st.recursive(
    st.one_of(tensors, sparse, low_rank, statics),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(messages)
def test_exact_messages_come_back_bit_for_bit(message: Any) -> None:
    data = wire.encode(message)
    assert tree.same(wire.decode(data, Any), message)
    assert wire.size(message) == len(data)
    assert wire.as_received(message, "exact") is message


@settings(max_examples=200, deadline=None)
@given(messages, st.sampled_from(PRECISIONS[1:]))
def test_rounded_is_what_the_receiver_sees(message: Any, precision: wire.Precision) -> None:
    try:
        data = wire.encode(message, precision)
    except WireError:
        for refuses in (wire.as_received, wire.size):
            with pytest.raises(WireError, match=f"the largest of {precision}"):
                refuses(message, precision)
        return
    seen = wire.as_received(message, precision)
    assert tree.same(wire.decode(data, Any), seen)
    assert wire.size(message, precision) == len(data)


@settings(max_examples=200, deadline=None)
@given(tensors, st.sampled_from(PRECISIONS))
def test_never_longer_than_dense_plus_the_header(tensor: Tensor, precision: wire.Precision) -> None:
    header = wire.size({"w": tensor.new_zeros(tensor.shape)}) + 1
    small = tensor.clamp(-60000, 60000) if tensor.is_floating_point() else tensor
    assert wire.size({"w": small}, precision) <= wire.dense_size(tensor) + header


def test_the_header_is_modest() -> None:
    mlp = {
        "0.weight": torch.randn(100, 784),
        "0.bias": torch.randn(100),
        "2.weight": torch.randn(10, 100),
        "2.bias": torch.randn(10),
    }
    assert wire.size(mlp) - wire.dense_size(mlp) <= 100


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("size", [1_000, 100_000, 1_000_000])
def test_sparse_leaves_reach_the_entropy_bound(size: int, density: float) -> None:
    draw = torch.Generator().manual_seed(0)
    count = int(size * density)
    message = {"w": torch.zeros(size)}
    message["w"][torch.randperm(size, generator=draw)[:count]] = 1.5
    header = wire.size({"w": torch.zeros(size)})
    bound = wire.entropy_size(message)
    assert bound <= wire.size(message) <= header + 1.01 * bound + 16


def test_a_dense_bool_tensor_is_packed_and_a_sparse_one_is_coded() -> None:
    draw = torch.Generator().manual_seed(0)
    empty = wire.size(torch.zeros(0, dtype=torch.bool)) + 4
    fair = torch.rand(8000, generator=draw) < 0.5
    rare = torch.rand(8000, generator=draw) < 0.01
    assert wire.size(fair) <= empty + 1000
    assert wire.size(rare) <= empty + 100
    assert wire.size(torch.ones(8000, dtype=torch.bool)) <= empty + 4


def test_low_rank_travels_as_factors() -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(s, generator=draw) for s in ((300, 2), (2, 300)))
    message = {"w": LowRank(left, right, (300, 300))}
    assert wire.size(message) <= 4 * 2 * 600 + 100
    found = wire.decode(wire.encode(message), dict[str, Tensor | LowRank])["w"]
    assert isinstance(found, LowRank)
    assert torch.equal(found.dense(), left @ right)


@pytest.mark.parametrize("flat", [False, True])
def test_negative_zero_survives(flat: bool) -> None:
    tensor = torch.ones(50) if flat else torch.zeros(50)
    tensor[7] = -0.0
    found = wire.decode(wire.encode(tensor), Tensor)
    assert math.copysign(1.0, float(found[7])) == -1.0


def test_dataclasses_come_from_the_hint() -> None:
    message = Pair({"w": torch.ones(2), "s": _sparse(torch.eye(5), True)}, 1, ("a", "b"), "b")
    found = wire.decode(wire.encode(message), Pair)
    assert isinstance(found, Pair)
    assert tree.same(found, message)
    with pytest.raises(WireError, match=r"\(root\): description does not fit"):
        wire.decode(wire.encode(message), dict[str, Tensor])


def test_a_refusal_by_the_class_itself_is_a_wire_error() -> None:
    message = Pair({}, 1.0)
    object.__setattr__(message, "width", -1.0)
    with pytest.raises(WireError, match="width is negative"):
        wire.decode(wire.encode(message), Pair)


def test_views_gradients_and_order_of_keys_do_not_matter() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    plain = {"a": base.T.contiguous(), "b": torch.ones(2)}
    other = {"b": torch.ones(2, requires_grad=True), "a": base.T}
    assert wire.encode(plain) == wire.encode(other)


def test_decoded_tensors_own_writable_memory() -> None:
    data = wire.encode({"w": torch.ones(100), "b": torch.ones(9, dtype=torch.bool)})
    copy = bytes(data)
    found = wire.decode(data, dict[str, Tensor])
    found["w"].zero_()
    found["b"].zero_()
    assert data == copy


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_senders_refuse_values_that_are_not_finite(number: float, precision: str) -> None:
    dense = {"layer": {"w": torch.tensor([1.0, number] * 9)}}
    compact = {"w": Sparse(torch.arange(9), torch.full((9,), number), (99,))}
    for message, name in ((dense, "layer.w"), (compact, "w")):
        with pytest.raises(WireError, match=f"^{name}: holds NaN"):
            wire.encode(message, precision)  # type: ignore[arg-type]  # parametrised by text
    if precision != "exact":
        with pytest.raises(WireError, match=r"^layer\.w: holds NaN"):
            wire.as_received(dense, precision)  # type: ignore[arg-type]  # parametrised by text


def test_values_beyond_a_precision_are_refused_by_name() -> None:
    for message in (
        {"w": torch.tensor([1.0, 65520.0] * 9)},
        {"w": Sparse(torch.arange(9), torch.full((9,), -1e6), (99,))},
    ):
        for refuses in (wire.encode, wire.as_received, wire.size):
            with pytest.raises(WireError, match=r"^w: a value is beyond 65504, .* float16"):
                refuses(message, "float16")
        assert wire.decode(wire.encode(message, "bfloat16"), dict[str, Any]).keys() == {"w"}


@pytest.mark.parametrize("places", [2**50, 2**63 - 1])
def test_a_support_in_more_places_than_there_is_memory_is_refused(places: int) -> None:
    message = {"w": Sparse(torch.tensor([3, 9]), torch.ones(2), (places,))}
    with pytest.raises(WireError, match=f"memory: too little to code {places} entries"):
        wire.encode(message)


def test_unknown_precision_is_a_config_error() -> None:
    for function in (wire.encode, wire.size, wire.as_received):
        function({}, "exact")
        with pytest.raises(ConfigError, match="unknown precision"):
            function({}, "int4")  # type: ignore[arg-type]  # the mistake under test


def test_the_limit_counts_what_is_held_and_what_it_stands_for() -> None:
    cases: list[tuple[Any, Any, int]] = [
        (torch.zeros(1000), Tensor, 4000),
        (_sparse(torch.ones(1000), False), Sparse, 12000),
        (LowRank(torch.ones(50, 1), torch.ones(1, 50), (50, 50)), LowRank, 10000),
        (LowRank(torch.ones(2, 9), torch.ones(9, 2), (2, 2)), LowRank, 144),
        (torch.zeros(7, dtype=torch.bool), Tensor, 7),
    ]
    for message, hint, needed in cases:
        data = wire.encode(message)
        assert tree.same(wire.decode(data, hint, limit=needed), message)
        with pytest.raises(WireError, match="above the limit"):
            wire.decode(data, hint, limit=needed - 1)


def test_size_is_fast_where_nothing_is_coded() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (100, 784), "0.bias": (100,), "2.weight": (10, 100), "2.bias": (10,)}
    message = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    weight = message["0.weight"]
    measured = min(timeit.repeat(lambda: wire.size(message), number=10, repeat=50))
    one_pass = min(timeit.repeat(lambda: weight.isfinite().all(), number=10, repeat=50))
    # a ratio, since the machine may be busy: one simple pass over the largest tensor
    assert measured < 3 * one_pass


@pytest.mark.slow
def test_eleven_million_entries_take_under_half_a_second_each_way() -> None:
    """Of this thread alone, and twice that where coverage watches every line."""
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randn(11_000_000, generator=draw)
    tensor[torch.rand(11_000_000, generator=draw) >= 0.05] = 0.0
    there, back = [], []
    for _ in range(3):
        start = time.thread_time()
        data = wire.encode(tensor)
        there.append(time.thread_time() - start)
        found = wire.decode(data, Tensor)
        back.append(time.thread_time() - start - there[-1])
    assert torch.equal(found, tensor)
    limit = 0.5 if sys.gettrace() is None else 1.0
    assert min(there) < limit
    assert min(back) < limit


def forged(shape: list[int], nonzeros: int, code: int) -> bytes:
    """Return a message of a few bytes that announces a tensor of this shape."""
    data = wire.encode({"w": torch.eye(2)})
    reader = frame.Reader(memoryview(data))
    flags = frame.read_prefix(reader)
    content = json.loads(frame._text(reader, bool(flags & frame.DEFLATED)))
    content[1][0] = [content[1][0][0], *shape]
    text = json.dumps(content, separators=(",", ":")).encode()
    body = frame.varint(len(text)) + text + frame.varint(nonzeros + 1) + frame.varint(code)
    body += bytes(code + 4 * nonzeros)
    crc = frame.checksum(0, [body])
    return frame.PREFIX.pack(frame.MAGIC, frame.VERSION, 0, crc) + body


def test_a_shape_beyond_floating_point_is_an_error_of_the_message() -> None:
    with pytest.raises(WireError, match=r"w: a shape of 2\^1024 entries or more"):
        wire.decode(forged([2**60] * 17 + [16], 1, 200), dict[str, Tensor])


@pytest.mark.parametrize(("size", "code"), [(2**29 - 1, 5), (2**25, 4)])
def test_a_few_bytes_do_not_take_seconds(size: int, code: int) -> None:
    data = forged([size], 1, code)
    assert len(data) < 60
    started = time.perf_counter()
    with pytest.raises(WireError, match=r"too many for \d+ bytes"):
        wire.decode(data, dict[str, Tensor])
    assert time.perf_counter() - started < 0.5


def test_a_very_sparse_message_needs_a_limit() -> None:
    wide = torch.zeros(9_000_000)
    wide[17] = 1.0
    data = wire.encode({"w": wide})
    with pytest.raises(WireError, match="pass a `limit`"):
        wire.decode(data, dict[str, Tensor])
    assert torch.equal(wire.decode(data, dict[str, Tensor], limit=1 << 26)["w"], wide)


def test_a_negative_zero_is_an_entry_so_masks_should_not_multiply() -> None:
    value = torch.linspace(-1, 1, 10_001)
    mask = torch.arange(len(value)) % 10 == 0
    product, selected = {"w": value * mask}, {"w": torch.where(mask, value, 0.0)}
    assert torch.equal(product["w"], selected["w"])
    received = wire.decode(wire.encode(product), dict[str, torch.Tensor])["w"]
    assert torch.equal(received.signbit(), product["w"].signbit())
    assert wire.size(product) > 4 * wire.size(selected)
