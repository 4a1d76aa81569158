from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import lowrank
from tests.algorithms.lowrank import Engine
from tests.reference_lowrank import HEAD, partial_rounds
from torch import nn

from parsifl.core import registry
from parsifl.core.errors import CapabilityError, ParsiflError
from parsifl.core.keys import Key
from parsifl.engine.simulate import simulate
from parsifl.nn.neural import NeuralProblem

METHODS = ("fedper", "fedrep", "lgfedavg")


@pytest.mark.parametrize("engine", lowrank.ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_rounds_match_the_papers_equations(name: str, engine: Engine) -> None:
    settings: dict[str, Any] = {"head_epochs": 1.0} if name == "fedrep" else {}
    method = registry.get(name, lr=0.2, batch_size=4, local_steps=5, **settings)
    start = lowrank.start()
    shared = set(HEAD) if name == "lgfedavg" else set(start) - set(HEAD)
    common, own = partial_rounds(
        start, shared, 0.2, lowrank.cohorts(), lowrank.sizes(), lowrank.draws(method),
        head_first=name == "fedrep",
    )  # fmt: skip
    done = lowrank.run(method, engine)
    lowrank.assert_same(done.server, common)
    for client in range(len(lowrank.SIZES)):
        lowrank.assert_same(done.personal(client).params, {**common, **own[client]})


@pytest.mark.parametrize("name", METHODS)
def test_there_is_no_global_model(name: str) -> None:
    done = lowrank.run(registry.get(name, local_steps=1), rounds=1)
    with pytest.raises(CapabilityError, match="no global model"):
        _ = done.model


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_is_all_head_is_refused(name: str) -> None:
    alone = NeuralProblem(lambda: nn.Sequential(nn.Linear(6, 3)), head="0", dtype=torch.float64)
    with pytest.raises(ParsiflError, match="head"):
        simulate(registry.get(name), alone, lowrank.DATA, 1)
    with pytest.raises(CapabilityError, match="body and a head"):
        registry.get(name).init_server(alone, lowrank.INFOS, Key(0))
