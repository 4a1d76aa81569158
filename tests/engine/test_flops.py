from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import pytest

from parsifl.algorithm import Local
from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.engine.simulate import simulate
from parsifl.problem import Params, Problem
from parsifl.testing.toys import Toy, classifier, clients
from parsifl.work import Shard


def per_step(batch: int) -> int:
    """4-5-3: forward and weight gradients of both layers, input gradient of the second."""
    first, second = 4 * 5, 5 * 3
    return 2 * batch * (2 * first + 3 * second)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_operations_agree_with_a_count_by_hand(engine: Any) -> None:
    profiles: Sequence[dict[str, int]] = [{"steps": 0}, {}, {"steps": 5}]
    data = clients((6, 9, 8), profiles=profiles)
    run = simulate(FedAvg(batch=4, steps=3), classifier(), data, 1, engine=engine)
    assert run.metrics[0]["flops"] == (0 + 3 + 5) * per_step(4)


def test_both_models_of_ditto_are_counted() -> None:
    method = Ditto(batch=3, steps=2, personal_epochs=1.0)
    run = simulate(method, classifier(), clients((6, 9)), 1)
    assert run.metrics[0]["flops"] == (2 * 2 + 2 + 3) * per_step(3)


@final
@dataclass(frozen=True)
class ReadsValues(Toy):
    """Look at a value, so that work without data is impossible."""

    def local(
        self, problem: Problem, down: Params, client: None, shard: Shard
    ) -> Local[None, Params]:
        """Branch on the first weight."""
        assert float(next(iter(down.values())).sum()) < 1e9
        return super().local(problem, down, client, shard)


def test_work_that_needs_values_is_not_counted() -> None:
    run = simulate(ReadsValues(), classifier(), clients((6, 9)), 1, engine="sequential")
    assert run.metrics[0]["flops"] is None
    assert run.metrics[0]["trained"] == 2
