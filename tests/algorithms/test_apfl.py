from __future__ import annotations

from typing import Any

import pytest
from tests.algorithms import lowrank
from tests.algorithms.lowrank import Engine
from tests.reference_lowrank import apfl_rounds

from parsifl.algorithms.apfl import APFL
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import ConfigError


@pytest.mark.parametrize("engine", lowrank.ENGINES)
@pytest.mark.parametrize("adaptive", [False, True])
def test_rounds_match_the_papers_equations(adaptive: bool, engine: Engine) -> None:
    method = APFL(alpha=0.4, adaptive=adaptive, lr=0.2, batch_size=4, epochs=2.0)
    expected = apfl_rounds(
        lowrank.start(), 0.4, 0.2, lowrank.cohorts(), lowrank.sizes(), lowrank.draws(method),
        adaptive=adaptive,
    )  # fmt: skip
    done = lowrank.run(method, engine)
    lowrank.assert_same(done.server, expected.w)
    trained = [client for client, _ in done.pool.store]
    for client in trained:
        a, v = expected.alpha[client], expected.v[client]
        mixed = {name: a * v[name] + (1 - a) * expected.w[name] for name in v}
        lowrank.assert_same(done.personal(client).params, mixed)
    moved = {expected.alpha[client] for client in trained}
    assert (moved != {0.4}) == adaptive


def test_without_a_share_of_its_own_every_client_has_the_model_of_fedavg() -> None:
    shared: dict[str, Any] = {"lr": 0.2, "batch_size": 4, "local_steps": 5}
    ours, theirs = lowrank.run(APFL(alpha=0.0, **shared)), lowrank.run(FedAvg(**shared))
    for client in range(len(lowrank.SIZES)):
        lowrank.assert_same(ours.personal(client).params, lowrank.arrays(theirs.server))


def test_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not support momentum"):
        APFL(momentum=0.9)
