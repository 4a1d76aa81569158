"""Fed-HT's recipes: the grid, the objective, and verdicts that can fail."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from parsifl_reproduction.fedht.setup import (
    BASELINE,
    LARGER,
    RATES,
    Race,
    Setting,
    grid,
    objectives,
    widened,
)
from parsifl_reproduction.fedht.simulations import SIMULATIONS
from parsifl_reproduction.recipe import Context, Result, find

SMOKE = Context("smoke", seeds=1)


def curve(setting: Setting, seed: int, *values: float | None) -> Result:
    return Result(setting.label, seed, {"objective": list(values), "bytes_up_per_round": 10})


def test_the_grid_is_that_of_the_paper() -> None:
    assert len(grid(Context())) == 2 * 4 * 9 + 9
    assert {s.steps for s in grid(Context()) if s.method == BASELINE} == {1}


@pytest.mark.parametrize("simulation", SIMULATIONS, ids=lambda s: s.name)
def test_a_job_returns_the_objective_every_two_rounds(simulation: Any) -> None:
    data = simulation.data(SMOKE, 0)
    good = objectives(Setting(BASELINE, 1, 0.001), simulation.problem(), data, 200, 50, 4, 0)
    assert len(good["objective"]) == 2
    assert good["objective"][1] < good["objective"][0]
    assert good["bytes_up_per_round"] > 0


def test_a_diverging_run_stops_and_is_recorded_as_such() -> None:
    simulation = SIMULATIONS[0]
    data = simulation.data(SMOKE, 0)
    bad = objectives(Setting("FedIter-HT", 3, 0.1), simulation.problem(), data, 200, 50, 10, 0)
    assert bad["objective"][-3:] == [None] * 3


def test_rows_of_the_variant_have_unit_length() -> None:
    x = np.asarray(SIMULATIONS[0].data(SMOKE, 0, unit=True).x)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1.0, rtol=1e-6)


def test_races_are_compared_seed_by_seed() -> None:
    ours, base = Setting("Fed-HT", 3, 0.1), Setting(BASELINE, 1, 0.1)
    same = [curve(base, seed, 3.0, 2.0, 1.0) for seed in (0, 1)]
    both = Race("x", [*same, *(curve(ours, seed, 1.0, 0.5, 0.5) for seed in (0, 1))], [ours, base])
    one = Race("x", [*same, curve(ours, 0, 1.0, 0.5, 0.5), curve(ours, 1, 4.0, 3.0, 2.0)],
               [ours, base])  # fmt: skip
    none = Race("x", [*same, *(curve(ours, seed, 4.0, None, None) for seed in (0, 1))],
                [ours, base])  # fmt: skip
    assert both.fewer_rounds("Fed-HT", "").verdict == "held"
    assert one.fewer_rounds("Fed-HT", "").verdict == "undecided"
    assert none.fewer_rounds("Fed-HT", "").verdict == "did not hold"
    assert "never" in none.fewer_rounds("Fed-HT", "").ours
    assert both.faster("Fed-HT", "", 0.1).verdict == "held"  # 2 of 6 rounds
    assert math.isinf(none.end(ours))
    more = both.more_iterations("Fed-HT")
    assert more is not None
    assert (more.verdict, more.ours) == ("did not hold", "6, 6 against 6 (by seed)")
    assert none.more_iterations("Fed-HT") is None  # nothing to compare


def test_the_common_step_is_the_largest_that_serves_every_method() -> None:
    settings = grid(Context())
    results = [curve(s, 0, 1.0, None if s.lr > 0.03 and s.method == "FedIter-HT" else 0.5)
               for s in settings]  # fmt: skip
    assert Race("x", results, settings).common_step() == 0.03
    worse = [curve(s, 0, 1.0, 0.8 if s.lr > 0.01 and s.method == "Fed-HT" else 0.5)
             for s in settings]  # fmt: skip
    assert Race("x", worse, settings, zero=math.log(2)).common_step() == 0.01


def test_a_best_step_at_the_end_of_the_grid_decides_nothing() -> None:
    settings = grid(Context())
    results = [curve(s, 0, 2.0, 1.0 / s.lr + ("Iter" not in s.method)) for s in settings]
    claim = Race("x", results, settings).lowest("FedIter-HT", "")
    assert "at the end of the grid: FedIter-HT K=3 lr=10, Fed-HT K=3 lr=10" in claim.note
    assert claim.verdict == "undecided"


def test_the_grid_is_widened_until_no_best_step_is_at_its_end() -> None:
    def results(best: float) -> list[Result]:
        tried = grid(Context(), LARGER)
        return [curve(s, 0, 2.0, abs(math.log(s.lr / best))) for s in tried]

    def further(best: float) -> set[float]:
        return {s.lr for s in widened(Context(), results(best))} - set(RATES)

    assert further(1.0) == set()
    assert further(5.0) == {3.0, 30.0}
    assert further(30.0) == {3.0, 30.0, 100.0, 300.0}
    assert further(0.001) == {3e-4, 3e-3}  # nothing was run there yet
    assert widened(Context("smoke"), results(30.0)) == grid(Context("smoke"))


def test_rows_of_unit_length_are_compared_by_time_and_iterations_too() -> None:
    recipe, context = find("fedht-simulation-i"), Context(seeds=1)
    results = [
        Result(job.label, 0, {"objective": [3.0, 2.0, 1.0] if BASELINE in job.label else [2.0, 1.0,
               0.5], "bytes_up_per_round": 1})
        for job in recipe.plan(context)
    ]  # fmt: skip
    unit = [
        claim for claim in recipe.conclude(context, results) if "unit length" in claim.statement
    ]
    assert sum("1.6 times as fast" in claim.statement for claim in unit) == 2
    assert sum("more local iterations" in claim.statement for claim in unit) == 2


def test_simulation_ii_is_compared_with_the_smallest_common_step_too() -> None:
    """The largest one that serves every method is not the one that favours the paper's methods."""
    recipe, context = find("fedht-simulation-ii"), Context(seeds=1)

    def last(label: str) -> float | None:
        if not label.endswith(("=0.01", "=0.001")):
            return None  # diverged
        return 0.4 if ("FedIter" in label) == label.endswith("=0.001") else 0.5

    results = [
        Result(job.label, 0, {"objective": [0.6, last(job.label)], "bytes_up_per_round": 1})
        for job in recipe.plan(context)
    ]
    said = [c.statement for c in recipe.conclude(context, results) if "fewer rounds" in c.statement]
    assert [f"common step {lr}:" in " ".join(said) for lr in ("0.01", "0.001")] == [True, True]


def test_one_step_for_all_is_compared_within_a_simulation_only() -> None:
    """Simulation II shares labels and the step with simulation I, but not the curves."""
    recipe, context = find("fedht-simulations-one-step"), Context(seeds=1)

    def ends(label: str) -> list[float]:
        if BASELINE in label:
            return [3.0, 2.0, 1.0]
        return [2.0, 0.9, 0.8] if label.startswith("II ") else [3.0, 2.0, 1.5]

    results = [
        Result(job.label, 0, {"objective": ends(job.label), "bytes_up_per_round": 1})
        for job in recipe.plan(context)
    ]
    verdicts = {
        claim.statement.partition(":")[0]: claim.verdict
        for claim in recipe.conclude(context, results)
        if "fewer rounds" in claim.statement
    }
    assert verdicts == {
        "simulation I, common step 0.0003": "did not hold",
        "simulation I, common step 0.003": "did not hold",
        "simulation II, common step 0.0003": "held",
    }


@pytest.mark.parametrize(
    "name", ["fedht-simulation-i", "fedht-simulation-ii", "fedht-simulations-one-step"]
)
def test_recipes_conclude_without_results_and_name_deviations(name: str) -> None:
    recipe = find(name)
    assert {claim.verdict for claim in recipe.conclude(Context(), [])} == {"not run"}
    assert recipe.deviations(Context())
