from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms import unequal
from tests.algorithms.unequal import PROBLEM, Engine
from tests.reference_unequal import cut, descend, sliced_rounds

from parsifl.algorithms._bases.submodel import merged, padded
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.heterofl import HeteroFL
from parsifl.algorithms.perfedmask import PerFedMask
from parsifl.core import tree
from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key

WIDTHS = (0.5, 1.0, 0.25, 0.5, 0.25)
PROFILES = [{"width": width} for width in WIDTHS]


def shapes(width: float) -> dict[str, tuple[int, ...]]:
    return {name: tuple(v.shape) for name, v in unequal.network(width).named_parameters()}


@pytest.mark.parametrize("engine", unequal.ENGINES)
def test_rounds_match_the_papers_equations(engine: Engine) -> None:
    method = HeteroFL(lr=0.05, batch_size=4, local_steps=3)
    expected = sliced_rounds(
        unequal.start(), WIDTHS, shapes, unequal.cohorts(), unequal.sizes(),
        unequal.draws(method, PROFILES), 0.05,
    )  # fmt: skip
    done = unequal.run(method, PROFILES, engine)
    unequal.assert_same(done.server.params, expected)
    for client, width in enumerate(WIDTHS):
        unequal.assert_same(done.personal(client).params, cut(expected, shapes(width)))


@pytest.mark.parametrize("engine", unequal.ENGINES)
@pytest.mark.parametrize(
    "kind", [HeteroFL, lambda **settings: PerFedMask(base="heterofl", **settings)]
)
def test_the_full_model_can_be_evaluated_on_every_device(kind: Any, engine: Engine) -> None:
    """Training is the same; fine-tuning and evaluation are those of the full model."""
    settings: dict[str, Any] = {"lr": 0.05, "batch_size": 4, "local_steps": 3, "tune_epochs": 2.0}
    slices = unequal.run(kind(**settings), PROFILES, engine)
    method = kind(**settings, deploy="full")
    full = unequal.run(method, PROFILES, engine, evaluate=True)
    unequal.assert_same(full.server.params, unequal.arrays(slices.server.params))
    start = unequal.arrays(full.server.params)
    if isinstance(method, PerFedMask):
        start |= {name: unequal.start()[name] for name in PROBLEM.head}
    for client in range(len(WIDTHS)):
        tuned = descend(start, unequal.tuning(method, client), 0.05)
        unequal.assert_same(full.personal(client).params, tuned)


@pytest.mark.bits
def test_with_full_width_it_is_fedavg_bit_for_bit() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "local_steps": 3, "momentum": 0.5}
    full = [{"width": 1.0}] * 3 + [{}] * 2
    hetero = unequal.run(HeteroFL(**settings), full)
    assert tree.same(hetero.server.params, unequal.run(FedAvg(**settings)).server)


def test_an_entry_that_no_device_has_keeps_its_value() -> None:
    narrow = [{"width": 0.5}] * 5
    done = unequal.run(HeteroFL(lr=0.1, batch_size=4, local_steps=3), narrow)
    old, new = PROBLEM.init(Key(unequal.SEED)), done.server.params
    assert torch.equal(new["2.weight"][2:], old["2.weight"][2:])
    assert not torch.equal(new["2.weight"][:2, :4], old["2.weight"][:2, :4])


def test_weak_devices_send_and_spend_less() -> None:
    done = unequal.run(HeteroFL(batch_size=4, local_steps=2), PROFILES, participation=1.0)
    rows = {row["trainable"]: row for row in done.metrics[0]["devices"]}
    sizes = {sum(map(np.prod, shapes(width).values())): width for width in WIDTHS}
    assert set(rows) == set(sizes)
    assert all(row["sent"] == size for size, row in rows.items())
    costs = [rows[size]["backward"] for size in sorted(sizes)]
    assert costs == sorted(set(costs))


def test_predictions_are_not_scaled() -> None:
    narrow = PROBLEM.narrow(0.5)
    params = narrow.init(Key(0))
    module = unequal.network(0.5).double()
    module.load_state_dict(params)
    x = torch.randn(5, unequal.FEATURES, dtype=torch.float64)
    torch.testing.assert_close(narrow.predict(params, x), module(x))


@pytest.mark.parametrize("width", [0, -0.5, 1.5, "half", True, float("nan")])
def test_a_width_that_is_none_is_refused_with_its_client(width: Any) -> None:
    profiles = [{}, {"width": width}, {}, {}, {}]
    with pytest.raises(ConfigError, match="width of client 1"):
        unequal.run(HeteroFL(), profiles, participation=1.0)


def test_merging_divides_by_the_weights_of_those_who_have_the_entry() -> None:
    first = padded({"w": torch.ones(1, 1)}, 3.0, {"w": (1, 3)})
    second = padded({"w": torch.full((1, 2), 5.0)}, 1.0, {"w": (1, 3)})
    total = tree.add(first, second)
    found = merged({"w": torch.full((1, 3), 9.0), "v": torch.zeros(1)}, total)
    assert found["w"].tolist() == [[2.0, 5.0, 9.0]]
    assert found["v"].tolist() == [0.0]
