from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis.errors import NoSuchExample
from tests.support import strategies
from torch import Tensor

from parsifl import wire
from parsifl.core import tree
from parsifl.core.leaves import LowRank, Sparse
from parsifl.data.clients import ClientData

FEW = settings(max_examples=50, deadline=None)
SEARCH = settings(
    max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@FEW
@given(strategies.trees())
def test_trees_come_apart_and_together(value: Any) -> None:
    leaves, structure = tree.flatten(value)
    assert tree.same(tree.unflatten(leaves, structure), value)
    assert hash(structure) == hash(tree.structure(value))


@FEW
@given(strategies.params(torch.float32))
def test_params_are_named_tensors_of_one_dtype(value: dict[str, Tensor]) -> None:
    assert value
    assert all(leaf.dtype == torch.float32 for leaf in value.values())
    assert tree.is_finite(value)


@FEW
@given(strategies.messages())
def test_messages_can_travel(message: dict[str, Any]) -> None:
    data = wire.encode(message)
    assert tree.same(wire.decode(data, dict[str, Tensor | Sparse | LowRank]), message)


@FEW
@given(strategies.client_data(max_clients=3))
def test_client_data_have_rows_to_train_and_to_test(data: ClientData) -> None:
    assert 1 <= len(data) <= 3
    assert all(len(part) for part in [*data.train, *data.test])
    seen = sorted(int(i) for part in [*data.train, *data.test] for i in part)
    assert seen == list(range(len(data.y)))


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (strategies.tensors(), lambda t: t.ndim == 0),
        (strategies.tensors(), lambda t: t.numel() == 0),
        (strategies.tensors(), lambda t: not t.is_contiguous()),
        (strategies.tensors(), lambda t: t.dtype == torch.bfloat16),
        (strategies.tensors(finite=False), lambda t: not tree.is_finite(t)),
        (strategies.tensors(torch.float64, (6,)), lambda t: 0 < int((t == 0).sum()) < 6),
        (strategies.trees(), lambda v: isinstance(v, strategies.Pair)),
        (strategies.trees(), lambda v: isinstance(v, dict) and len(v) > 1),
        (strategies.messages(), lambda m: any(isinstance(v, LowRank) for v in m.values())),
        (strategies.messages(), lambda m: any(isinstance(v, Sparse) for v in m.values())),
        (strategies.client_data(), lambda d: len({len(part) for part in d.train}) > 1),
    ],
)
def test_the_hard_cases_are_drawn(strategy: Any, wanted: Callable[[Any], bool]) -> None:
    try:
        find(strategy, wanted, settings=SEARCH)
    except NoSuchExample:
        pytest.fail("the strategy never draws this case")


@FEW
@given(strategies.tensors(finite=True))
def test_tensors_are_finite_unless_asked_otherwise(value: Tensor) -> None:
    assert tree.is_finite(value)


@FEW
@given(strategies.tensors(torch.float64, (5,), zeros=False))
def test_shape_and_dtype_are_obeyed(value: Tensor) -> None:
    assert value.shape == (5,)
    assert value.dtype == torch.float64
