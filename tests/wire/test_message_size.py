from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.errors import WireError
from parsifl.core.leaves import LowRank, Sparse


@dataclass(frozen=True)
class Upload:
    params: dict[str, Any]
    parts: tuple[Tensor, ...]
    width: float
    flag: int | bool = 1


def _upload() -> Upload:
    return Upload({"a": torch.ones(2, 3), "b": torch.ones(4)}, (torch.ones(1),), 0.5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"params": {"a": torch.ones(2, 3)}}, "params.b: missing"),
        ({"params": {**_upload().params, "c": torch.ones(1)}}, "params.c: not expected"),
        ({"params": {**_upload().params, "a": torch.ones(3, 2)}}, "params.a: .*(3, 2).*(2, 3)"),
        ({"params": {**_upload().params, "a": torch.ones(2, 3).int()}}, "params.a: .*int32"),
        ({"params": {**_upload().params, "a": {}}}, "params.a: a dict instead of a tensor"),
        ({"params": {**_upload().params, "a": 3}}, "params.a: the static 3 instead of a tensor"),
        ({"params": (torch.ones(1),)}, "params: a tuple instead of a dict"),
        ({"params": _upload()}, "params: a dataclass instead of a dict"),
        ({"parts": ()}, "parts.0: missing"),
        ({"parts": (torch.ones(1), torch.ones(1))}, "parts.1: not expected"),
        ({"width": 0.25}, "width: 0.25 instead of 0.5"),
        ({"flag": True}, "flag: True instead of 1"),
    ],
)
def test_check_names_the_field_that_differs(change: dict[str, Any], text: str) -> None:
    template = tree.to_meta(_upload())
    wire.check(_upload(), template)
    with pytest.raises(WireError, match=text.replace("(", r"\(").replace(")", r"\)")):
        wire.check(replace(_upload(), **change), template)


def test_check_tells_classes_apart() -> None:
    @dataclass(frozen=True)
    class Other:
        w: Tensor

    first = Other(torch.ones(1))

    @dataclass(frozen=True)
    class Another:
        w: Tensor

    with pytest.raises(WireError, match=r"\(root\): class Another instead of Other"):
        wire.check(Another(torch.ones(1)), first)
    Another.__name__ = "Other"
    with pytest.raises(WireError, match=r"\(root\): another class of the same name"):
        wire.check(Another(torch.ones(1)), first)


def test_rank_and_number_of_non_zeros_are_free_but_kinds_are_not() -> None:
    one = LowRank(torch.ones(3, 1), torch.ones(1, 4), (3, 4))
    two = LowRank(torch.ones(3, 2), torch.ones(2, 4), (3, 4))
    wire.check({"w": one}, tree.to_meta({"w": two}))
    few, many = (Sparse(torch.arange(k), torch.ones(k), (3, 4)) for k in (1, 9))
    wire.check({"w": few}, tree.to_meta({"w": many}))
    with pytest.raises(WireError, match="w: a LowRank instead of a Sparse"):
        wire.check({"w": one}, {"w": few})
    with pytest.raises(WireError, match="w: a LowRank instead of a tensor"):
        wire.check({"w": one}, {"w": torch.ones(3, 4)})


def test_dense_size_counts_the_tensors_that_leaves_stand_for() -> None:
    message = (
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(9, dtype=torch.bool),
        Sparse(torch.arange(2), torch.ones(2), (5, 5)),
        LowRank(torch.ones(6, 1), torch.ones(1, 6), (6, 6)),
    )
    assert wire.dense_size(message) == 80 + 2 + 100 + 144


def test_entropy_size_is_the_bound_of_the_shorter_form() -> None:
    tensor = torch.zeros(100)
    tensor[:5] = 1.0
    support = math.log2(math.comb(100, 5)) / 8
    index = torch.arange(5)
    assert wire.entropy_size(tensor) == pytest.approx(support + 20)
    assert wire.entropy_size(Sparse(index, torch.ones(5), (100,))) == pytest.approx(support + 20)
    assert wire.entropy_size(tensor != 0) == pytest.approx(support)
    assert wire.entropy_size(torch.ones(100)) == 400
    assert wire.entropy_size(LowRank(torch.ones(6, 1), torch.ones(1, 6), (6, 6))) == 48


def test_narrow_values_lower_the_bound() -> None:
    tensor = torch.zeros(1000)
    tensor[:50] = torch.rand(50) + 0.5
    support = math.log2(math.comb(1000, 50)) / 8
    assert wire.entropy_size(tensor, "bfloat16") == pytest.approx(support + 100)
    assert wire.entropy_size(torch.ones(100), "int8") == 100
    for precision in wire.PRECISIONS:
        bound = wire.entropy_size(wire.as_received(tensor, precision), precision)
        assert bound <= wire.size(tensor, precision) <= bound + 60


@pytest.mark.parametrize("precision", wire.PRECISIONS)
def test_one_pass_measures_what_separate_passes_do(precision: wire.Precision) -> None:
    sparse = torch.zeros(1000)
    sparse[::40] = torch.rand(25) + 0.5
    message = {
        "dense": torch.rand(20, 30) + 0.5,
        "view": (torch.rand(30, 20) + 0.5).T,
        "few": sparse,
        "mask": sparse != 0,
        "empty": torch.zeros(0),
        "scalar": torch.tensor(2.0),
        "labels": torch.arange(7),
        "listed": Sparse(torch.arange(0, 5000, 100), torch.rand(50) + 0.5, (5000,)),
        "filled": Sparse(torch.arange(5), torch.rand(5) + 0.5, (5,)),
        "factors": LowRank(torch.rand(6, 1) + 0.5, torch.rand(1, 6) + 0.5, (6, 6)),
    }
    content = wire.measure(message, precision)
    length = content.bytes
    assert length == len(wire.encode(message, precision))
    assert content.dense == wire.dense_size(message)
    seen = wire.as_received(message, precision)
    assert content.entropy == pytest.approx(wire.entropy_size(seen, precision), rel=1e-12)
    assert content.values == 600 + 600 + 1000 + 0 + 1 + 50 + 5 + 12
    assert wire.measure(seen, precision)[1:] == pytest.approx(content[1:], rel=1e-12)


def test_a_zero_is_noticed_after_messages_without_any() -> None:
    full = {"w": torch.rand(1000) + 0.5}
    assert wire.measure(full) == wire.measure({"w": full["w"] + 1})
    empty = {"w": torch.where(torch.arange(1000) < 10, full["w"], 0.0)}
    content = wire.measure(empty)
    length = content.bytes
    assert length == len(wire.encode(empty)) < wire.measure(full).bytes / 10
    assert content.entropy == wire.entropy_size(empty)
    assert (content.dense, content.values) == (4000, 1000)


def test_messages_of_one_structure_but_other_shapes_have_their_own_length() -> None:
    for size in (3, 300, 3):
        message = {"w": torch.ones(size)}
        assert wire.size(message) == len(wire.encode(message))
        assert wire.decode(wire.encode(message), dict[str, Tensor])["w"].shape == (size,)
