"""Mutated messages: whatever comes, `decode` gives a tree or a `WireError`, within its limit.

PARSIFL_MUTANTS sets how many are tried.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import WireError
from parsifl.core.leaves import LowRank, Sparse

Seal = Callable[[bytes], bytes]
LIMIT = 1 << 16
MUTANTS = int(os.environ.get("PARSIFL_MUTANTS") or 8_000)
INTERESTING = [
    b"\x00",
    b"\x01",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xff" * 9,
    b"[",
    b"{",
    b'"',
    b"-",
    b"e9",
]


@dataclass(frozen=True)
class Upload:
    params: dict[str, Tensor | Sparse | LowRank]
    nested: tuple[Tensor, ...] | None
    width: float
    mode: Literal["a", "b"]


def _corpus() -> list[tuple[bytes, Any]]:
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(4, 5, generator=draw)
    rare = torch.where(torch.rand(200, generator=draw) < 0.05, 1.0, 0.0)
    sparse = Sparse(torch.tensor([3, 50, 98]), torch.tensor([1.0, 0.0, -2.0]), (10, 10))
    low_rank = LowRank(torch.ones(6, 1), torch.eye(1, 6), (2, 2, 3, 3))
    upload = Upload({"w": dense, "s": sparse, "l": low_rank}, (rare,), 0.5, "b")
    mixed = {
        "bits": rare != 0,
        "all": torch.ones(9, dtype=torch.bool),
        "half": dense.half(),
        "brain": dense.bfloat16(),
        "long": torch.arange(7),
        "scalar": torch.tensor(1.0, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    many = {f"layer{i}.weight": torch.ones(2) for i in range(12)}
    messages: list[tuple[Any, Any]] = [
        (upload, Upload), (mixed, dict[str, Tensor]), (many, dict[str, Tensor]), (rare, Tensor),
        (sparse, Sparse), (low_rank, LowRank),
    ]  # fmt: skip
    corpus = [(wire.encode(message), hint) for message, hint in messages]
    lossy: list[wire.Precision] = ["bfloat16", "float16", "int8"]
    return corpus + [(wire.encode(upload, precision), Upload) for precision in lossy]


def _mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    output = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(len(output) + 1)
        kind = draw.randrange(7)
        if kind == 0 and at < len(output):
            output[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(output):
            output[at] = draw.randrange(256)
        elif kind == 2:
            del output[at : at + draw.choice([1, 4, 1000])]
        elif kind == 3:
            output[at:at] = draw.randbytes(draw.choice([1, 4, 16]))
        elif kind == 4:
            output[at : at + 1] = draw.choice(INTERESTING)
        elif kind == 5:
            source = draw.randrange(len(other))
            length = draw.choice([1, 8, 64])
            output[at : at + length] = other[source : source + length]
        else:
            number = draw.choice([2**14, 2**31, 2**62])
            output[at:at] = bytes([number >> s & 127 | 128 for s in range(0, 56, 7)]) + b"\x01"
    return bytes(output)


def _outcome(data: bytes, hint: Any) -> str:
    try:
        message = wire.decode(data, hint, limit=LIMIT)
    except WireError as error:
        field = str(error).partition(":")[0]
        known = {"prefix", "magic", "version", "flags", "checksum", "description", "length"}
        return field if field in known else "leaf"
    # what is accepted is a message like any other
    assert tree.is_finite(message)
    assert tree.same(wire.decode(wire.encode(message), hint), message)
    return "accepted"


def _attack(count: int, seed: int, seal: Seal) -> Counter[str]:
    draw = random.Random(seed)
    corpus = _corpus()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        (data, hint), (other, _) = draw.choice(corpus), draw.choice(corpus)
        mutant = _mutated(data, other, draw)
        if draw.random() < 0.9 and len(mutant) >= 10:  # else only the checksum would be tried
            mutant = seal(mutant)
        outcomes[_outcome(mutant, hint)] += 1
    return outcomes


@pytest.mark.slow
def test_thousands_of_mutants_are_read_or_refused(sealed: Seal) -> None:
    outcomes = _attack(MUTANTS, 1, sealed)
    assert sum(outcomes.values()) == MUTANTS
    for stage in ("checksum", "description", "length", "leaf", "accepted"):
        assert outcomes[stage] > MUTANTS // 100, outcomes


def test_mutants_allocate_no_more_than_the_limit_allows(sealed: Seal) -> None:
    _attack(200, 2, sealed)  # caches are filled before memory is watched
    tracemalloc.start()
    try:
        _attack(1_500, 3, sealed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the corpus itself, a few copies of one message, and what regular expressions and JSON keep
    assert peak < 20 * LIMIT


def test_every_truncation_and_every_flipped_byte_is_refused() -> None:
    for data, hint in _corpus():
        for at in range(len(data)):
            assert _outcome(data[:at], hint) != "accepted"
            flipped = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
            assert _outcome(flipped, hint) != "accepted"


def test_random_bytes_behind_a_good_prefix_are_refused(sealed: Seal) -> None:
    draw = random.Random(4)
    for _ in range(2_000):
        data = b"PSFL\x02" + bytes([draw.randrange(8)]) + bytes(4) + draw.randbytes(60)
        assert _outcome(sealed(data), dict[str, Tensor]) != "accepted"
