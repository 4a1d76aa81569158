"""Fed-HT's recipes: the grid, the objective, and verdicts that can fail."""

from __future__ import annotations

from typing import Any

import pytest

from parsifl_reproduction.fedht.setup import Setting, curve, grid, rounds_to
from parsifl_reproduction.fedht.simulations import SIMULATIONS
from parsifl_reproduction.recipe import Context, Result, find


def test_the_full_grid_is_that_of_the_paper() -> None:
    jobs = find("fedht-simulation-i").plan(Context(scale="full", seeds=1))
    assert len(jobs) == 2 * 4 * 9 + 9


def test_distributed_iht_has_one_step() -> None:
    settings = grid((3, 5), (0.1, 0.01))
    assert [s.steps for s in settings if s.method == "Distributed-IHT"] == [1, 1]


@pytest.mark.parametrize("simulation", SIMULATIONS, ids=lambda s: s.name)
def test_a_job_returns_the_objective_every_five_rounds(simulation: Any) -> None:
    from parsifl_reproduction.fedht.setup import objectives

    data = simulation.data(Context(), 0)
    good = objectives(
        Setting("Distributed-IHT", 1, 0.001), simulation.problem(), data, 200, 50, 10, 0
    )
    assert len(good["objective"]) == 2
    assert good["objective"][1] < good["objective"][0]


def test_a_diverging_run_is_recorded_as_such() -> None:
    from parsifl_reproduction.fedht.setup import objectives

    simulation = SIMULATIONS[0]
    data = simulation.data(Context(), 0)
    bad = objectives(Setting("FedIter-HT", 3, 0.1), simulation.problem(), data, 200, 50, 10, 0)
    assert bad["objective"][-1] is None


def test_verdicts_follow_the_numbers() -> None:
    recipe, context = find("fedht-simulation-i"), Context(seeds=1)

    def results(local: list[float]) -> list[Result]:
        values = {"Distributed-IHT": [3.0, 2.0, 1.0]}
        return [
            Result(job.label, 0, {"objective": values.get(job.label.split()[0], local)})
            for job in recipe.plan(context)
        ]

    fast = recipe.conclude(context, results([2.0, 1.0, 0.5]))
    slow = recipe.conclude(context, results([5.0, 4.0, 3.0]))
    assert {claim.verdict for claim in fast} == {"held"}
    assert {claim.verdict for claim in slow} == {"did not hold"}
    assert rounds_to([3.0, 1.0], 1.0) == 10
    assert curve([Result("a", 0, {"objective": [1.0, None]})], "a")[1] == float("inf")
