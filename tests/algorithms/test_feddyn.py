from __future__ import annotations

import pytest
from tests.algorithms import lowrank
from tests.algorithms.lowrank import Engine
from tests.reference_lowrank import combine, dyn_rounds

from parsifl.algorithms.feddyn import FedDyn
from parsifl.core.errors import ConfigError


@pytest.mark.parametrize("engine", lowrank.ENGINES)
def test_rounds_match_the_papers_equations(engine: Engine) -> None:
    method = FedDyn(alpha=0.3, lr=0.2, batch_size=4, local_steps=5)
    expected = dyn_rounds(
        lowrank.start(), 0.3, 0.2, lowrank.cohorts(), len(lowrank.SIZES), lowrank.draws(method)
    )
    lowrank.assert_same(lowrank.run(method, engine).server.params, expected)


def test_the_server_keeps_the_mean_of_all_duals() -> None:
    done = lowrank.run(FedDyn(alpha=0.3, lr=0.2, batch_size=4, local_steps=5))
    duals = [lowrank.arrays(state) for _, state in done.pool.store]
    total = combine(lambda *values: sum(values), *duals)
    mean = combine(lambda value: value / len(lowrank.SIZES), total)
    lowrank.assert_same(done.server.dual, mean)


def test_a_vanishing_proximal_term_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha"):
        FedDyn(alpha=0.0)
