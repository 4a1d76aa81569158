from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import unequal
from tests.algorithms.unequal import PROBLEM, SEED, Engine
from tests.reference_unequal import BODY, descend, masked_rounds

from parsifl.algorithms.fedbabu import FedBABU
from parsifl.core.keys import Key

SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "batch_size": 4,
    "local_steps": 3,
    "momentum": 0.5,
    "weight_decay": 0.01,
}


@pytest.mark.parametrize("engine", unequal.ENGINES)
@pytest.mark.parametrize("tune", [{"tune_epochs": 2.0}, {"tune_epochs": None, "tune_steps": 3}])
def test_rounds_match_the_papers_equations(tune: Any, engine: Engine) -> None:
    method = FedBABU(**SETTINGS, **tune)
    done = unequal.run(method, engine=engine)
    body = [[name for block in BODY for name in block]] * len(unequal.SIZES)
    expected = masked_rounds(
        unequal.start(), body, unequal.cohorts(), unequal.sizes(), unequal.draws(method), 0.1,
        momentum=0.5, decay=0.01,
    )  # fmt: skip
    unequal.assert_same(done.server.params, expected)
    for client in range(len(unequal.SIZES)):
        tuned = descend(expected, unequal.tuning(method, client), 0.1, momentum=0.5, decay=0.01)
        unequal.assert_same(done.personal(client).params, tuned)


def test_fedbabu_leaves_the_head_as_it_was_drawn_and_never_sends_it() -> None:
    done = unequal.run(FedBABU(**SETTINGS), participation=1.0)
    first = PROBLEM.init(Key(SEED))
    for name in PROBLEM.head:
        assert torch.equal(done.server.params[name], first[name])
        assert not torch.equal(done.personal(0).params[name], first[name])
    body = sum(block.size for block in PROBLEM.layer_groups)
    record = done.metrics[0]
    assert (record["parameters_up"], record["parameters_down"]) == (5 * body, 5 * body)
