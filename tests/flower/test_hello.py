from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from parsifl.core.errors import DataError, WireError
from parsifl.data.clients import ClientData
from parsifl.flower.hello import DataSchema, agree

ROWS = np.random.default_rng(0).standard_normal((8, 3))


def schema(y: Any, x: Any = ROWS) -> DataSchema:
    return DataSchema.of(ClientData.of([(x, np.asarray(y))]))


def test_schema_survive_json_and_hold_no_rows() -> None:
    found = schema([0, 1, 2, 0, 1, 2, 0, 1])
    text = json.dumps(found.to_json())
    assert DataSchema.read(json.loads(text)) == found
    assert len(text) < 300


def test_the_example_has_the_form_of_the_data() -> None:
    sparse = schema(np.arange(8.0) / 3, csr_matrix(ROWS))
    assert sparse.sparse
    assert sparse.example().x.shape == (1, 3)
    assert DataSchema.of(sparse.example()) == sparse
    dense = schema([0, 1] * 4)
    assert DataSchema.of(dense.example()) == dense
    assert dense.features(5).shape == (5, 3)
    assert dense.features(5).device.type == dense.targets(5).device.type == "meta"
    assert dense.targets(5).dtype == torch.int64


def test_a_client_may_lack_classes() -> None:
    few, many = schema([0, 1] * 4), schema([0, 1, 2, 3] * 2)
    assert agree({0: few, 1: many}).classes == 4


@pytest.mark.parametrize(
    "other", [{"shape": (4,)}, {"dtype": "float32"}, {"sparse": True}, {"classes": None}]
)
def test_other_differences_are_refused(other: dict[str, Any]) -> None:
    found = schema([0, 1] * 4)
    with pytest.raises(DataError):
        agree({0: found, 1: replace(found, **other)})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [0]}, {"shape": "3"}, {"shape": [1 << 30, 1 << 30]}, {"shape": [1.5]},
        {"dtype": "object"}, {"target_dtype": None}, {"classes": -1}, {"classes": True},
        {"sparse": 1}, {"dtype": ["float32"]}, {"classes": 2**31 - 1}, {"classes": 10**400},
        {"name": "x" * 300}, {"more": 1},
    ],
)  # fmt: skip
def test_forged_schema_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="data_schema"):
        DataSchema.read({**schema([0, 1] * 4).to_json(), **change})
