from __future__ import annotations

import pytest
from tests.algorithms import unequal
from tests.algorithms.unequal import Engine
from tests.reference_unequal import nova_length, nova_rounds

from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.fednova import FedNova
from parsifl.core import tree

SPEEDS = [{"local_steps": 2}, {"local_steps": 5}, {}, {"epochs": 1}, {"local_steps": 1}]


@pytest.mark.parametrize("engine", unequal.ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_match_the_papers_equations(momentum: float, engine: Engine) -> None:
    method = FedNova(lr=0.1, batch_size=4, local_steps=4, momentum=momentum)
    expected = nova_rounds(
        unequal.start(), unequal.cohorts(), unequal.sizes(), unequal.draws(method, SPEEDS),
        0.1, momentum,
    )  # fmt: skip
    unequal.assert_same(unequal.run(method, SPEEDS, engine).server, expected)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(weighting: str, momentum: float) -> None:
    settings = {
        "lr": 0.1,
        "batch_size": 4,
        "local_steps": 3,
        "weighting": weighting,
        "momentum": momentum,
    }
    plain = unequal.run(FedAvg(**settings))  # type: ignore[arg-type]  # a dict of all kinds
    nova = unequal.run(FedNova(**settings))  # type: ignore[arg-type]
    unequal.assert_same(nova.server, unequal.arrays(plain.server), 1e-13)


def test_with_unequal_steps_it_is_not_fedavg() -> None:
    plain = unequal.run(FedAvg(lr=0.1, batch_size=4), SPEEDS)
    nova = unequal.run(FedNova(lr=0.1, batch_size=4), SPEEDS)
    assert not tree.same(plain.server, nova.server)


def test_length_of_the_accumulation_vector_is_the_sum_of_its_entries() -> None:
    """The closed form of the notes, against the sum, for the paper's 36 and 18 steps."""
    for steps in (1, 18, 36):
        closed = (steps - 0.9 * (1 - 0.9**steps) / 0.1) / 0.1
        assert closed == pytest.approx(nova_length(steps, 0.9))
