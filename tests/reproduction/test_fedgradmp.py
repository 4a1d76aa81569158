"""FedGradMP's recipes: the protocols, and verdicts that can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.algorithms.fediterht import FedIterHT
from parsifl.engine.simulate import simulate
from parsifl_reproduction.fedgradmp import baselines as fedgradmp_baselines
from parsifl_reproduction.fedgradmp import setup
from parsifl_reproduction.fedgradmp.setup import Recovery, final, rounds_until
from parsifl_reproduction.recipe import Claim, Context, Result, find

NAMES = [f"fedgradmp-figure{number}" for number in (1, 3, 4, 5, 8, 9, 10, 11)]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_plans_jobs_with_distinct_labels(name: str) -> None:
    jobs = find(name).plan(Context(seeds=2))
    pairs = {(job.label, job.seed) for job in jobs}
    assert len(pairs) == len(jobs) >= 2


def test_measurements_are_those_of_the_paper() -> None:
    data, truth = Recovery(1.0, clients=30).data(0)
    assert len(data) == 30
    assert [len(rows) for rows in data.train] == [100] * 30
    assert np.linalg.norm(truth) == pytest.approx(1.0)
    assert int((truth != 0).sum()) == 10


def test_errors_by_round_end_at_machine_precision() -> None:
    values = Recovery(0.2, clients=30).errors(FedGradMP(tau=10, batch_size=40), 4, seed=1)
    assert len(values["errors"]) == 4
    assert values["errors"][0] > 0.01
    assert values["errors"][-1] < 1e-14
    assert (rounds_until(values, 1e-14) or 99) <= 4
    assert not values["diverged"]


def test_a_large_learning_rate_diverges_and_is_said_to() -> None:
    values = Recovery(1.0, clients=30).errors(
        FedIterHT(tau=10, lr=0.02, local_steps=3, batch_size=40), 6, 0
    )
    assert values["errors"][-1] > 1.0


def test_verdicts_follow_the_numbers() -> None:
    recipe, context = find("fedgradmp-figure1"), Context(seeds=2)

    def verdicts(error: float, level: float, slower: float) -> set[str]:
        def values(label: str) -> list[float]:
            if "K=1" in label:
                return [0.5 * (slower if "2.5" in label else 1.0)] + [
                    1e-13 if at > (5 if "2.5" in label and slower > 1 else 3) else 1e-3
                    for at in range(7)
                ]
            if label.startswith("alpha"):
                return [1.0] * 7 + [error]
            return [level] * 8

        results = [
            Result(job.label, job.seed, {"errors": values(job.label), "diverged": False})
            for job in recipe.plan(context)
        ]
        claims = recipe.conclude(context, results)
        return {claim.verdict for claim in claims if "(I-B)" not in claim.paper}

    assert verdicts(1e-15, 1e-3, 1.5) == {"held"}
    # the oracle has the same level, and both heterogeneities need the same number of rounds
    assert verdicts(1e-3, 0.5, 0.5) == {"did not hold", "held", "tie"}


def test_residuals_of_the_size_of_rounding_errors_are_named() -> None:
    recipe, context = find("fedgradmp-figure11"), Context(seeds=3)

    def claims(scale: float) -> list[Claim]:
        results = [
            Result(job.label, job.seed, {"errors": [scale * cohort] * 15, "diverged": False})
            for job in recipe.plan(context)
            for cohort in [int(job.label.partition("cohort=")[2])]
        ]
        found = recipe.conclude(context, results)
        return [claim for claim in found if "residual error is larger" in claim.statement]

    assert {claim.verdict for claim in (*claims(1e-3), *claims(1e-17))} == {"held"}
    assert not any("rounding" in claim.note for claim in claims(1e-3))
    assert all("rounding" in claim.note for claim in claims(1e-17))


def test_the_oracle_is_least_squares_on_the_true_support() -> None:
    case = Recovery(0.2, clients=3, dimension=50, sparsity=4)
    assert case.oracle(0) < 1e-12
    assert 1e-5 < replace(case, noise=1e-4).oracle(0) < 1e-1


def test_baselines_are_compared_by_rounds_and_by_time() -> None:
    recipe, context = find("fedgradmp-figure3"), Context(seeds=1)

    def verdicts(ours: float, seconds: float) -> list[str]:
        def values(label: str) -> dict[str, object]:
            if label == "FedGradMP":
                return {"errors": [ours] * 10, "seconds": seconds, "diverged": False}
            return {"errors": [0.5] * 40, "seconds": 4.0, "diverged": False}

        results = [Result(job.label, 0, values(job.label)) for job in recipe.plan(context)]
        return [claim.verdict for claim in recipe.conclude(context, results)[:6]]

    assert verdicts(1e-15, 10.0) == ["held", "held"] * 3
    assert verdicts(1e-15, 100.0) == ["held", "did not hold"] * 3
    assert verdicts(0.9, 1.0) == ["did not hold", "did not hold"] * 3


def test_the_number_of_gradient_steps_is_chosen_by_the_last_error() -> None:
    recipe, context = find("fedgradmp-figure5"), Context(seeds=2)
    ends = {"inner=10": 0.6, "inner=50": 0.5, "inner=100": 0.55}

    def values(label: str) -> dict[str, object]:
        end = next((end for name, end in ends.items() if label.endswith(name)), 0.9)
        return {"errors": [end] * 48, "seconds": 1.0, "diverged": False}

    results = [Result(job.label, job.seed, values(job.label)) for job in recipe.plan(context)]
    nearer = recipe.conclude(context, results)[0]
    assert nearer.verdict == "held"
    assert nearer.ours.startswith("5.0e-01")
    assert nearer.note.endswith("; 50 gradient steps")


def test_times_leave_out_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def kept(*args: Any, **options: Any) -> Any:
        runs.append(simulate(*args, **options))
        return runs[-1]

    monkeypatch.setattr(setup, "simulate", kept)
    case = Recovery(0.2, clients=3, dimension=50, sparsity=4)
    assert case.seconds(FedGradMP(tau=4), 2, 0) > 0
    assert [record.get("global") for record in runs[0].metrics] == [None, None]


def test_the_same_method_is_counted_once() -> None:
    recipe, context = find("fedgradmp-figure3"), Context(seeds=1)
    claims = recipe.conclude(context, [])
    assert {claim.verdict for claim in claims} == {"not run"}
    counted = [claim.statement for claim in claims if claim.counted]
    assert len(counted) == 2
    assert all("FedMid" in statement for statement in counted)


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([0.9**round for round in range(40)], "held"),
        ([1 / (1 + round) for round in range(40)], "did not hold"),  # slower than any line
        ([0.5] * 40, "did not hold"),
    ],
)
def test_linear_convergence_of_fediterht_is_a_line_in_the_logarithm(
    curve: list[float], verdict: str
) -> None:
    label = f"FedIterHT lr={fedgradmp_baselines.RATES[0]}"
    values = {"errors": curve, "seconds": 1.0, "diverged": False}
    results = [Result(label, seed, values) for seed in range(2)]
    claims = find("fedgradmp-figure3").conclude(Context(), results)
    found = [claim for claim in claims if "converges linearly" in claim.statement]
    assert [claim.verdict for claim in found] == [verdict]


def test_figure_4_compares_the_baselines_with_themselves_in_figure_3() -> None:
    recipe, context = find("fedgradmp-figure4"), Context(seeds=2)
    milder = {job.fingerprint for job in find("fedgradmp-figure3").plan(context)}
    assert milder < {job.fingerprint for job in recipe.plan(context)}

    def verdicts(here: float, failing: int) -> dict[str, str]:
        def error(label: str) -> float:
            if label.endswith("FedGradMP"):
                return 1e-15
            rate = fedgradmp_baselines.RATES.index(float(label.rpartition("=")[2]))
            count, best = (2, 0.01) if label.startswith("Figure 3: ") else (failing, here)
            return 1.5 if rate >= len(fedgradmp_baselines.RATES) - count else best

        results = [
            Result(
                job.label,
                job.seed,
                {"errors": [error(job.label)] * 40, "seconds": 1.0, "diverged": False},
            )
            for job in recipe.plan(context)
        ]
        claims = recipe.conclude(context, results)
        return {claim.statement: claim.verdict for claim in claims[6:]}

    worse, same = verdicts(0.1, 3), verdicts(0.015, 2)
    assert list(worse.values()) == ["held"] * 5
    assert list(same.values()) == ["held"] + ["did not hold", "tie"] * 2  # equally many rates fail


@pytest.mark.parametrize(
    ("mild", "strong", "verdicts"),
    [
        (1.1e-3, 1.5e-3, ["held", "held"]),
        (1.1e-3, 0.8e-3, ["did not hold", "did not hold"]),
        (0.5e-3, 0.8e-3, ["did not hold", "held"]),
    ],
)
def test_drift_is_compared_with_one_iteration_and_with_milder_data(
    mild: float, strong: float, verdicts: list[str]
) -> None:
    ends = {"noisy alpha=0.2": mild, "noisy alpha=2.5": strong}
    ends |= {f"noisy K=1 alpha={alpha}": 1e-3 for alpha in (0.2, 2.5)}
    results = [
        Result(label, seed, {"errors": [end] * 8, "diverged": False})
        for label, end in ends.items()
        for seed in range(3)
    ]
    claims = find("fedgradmp-figure1").conclude(Context(), results)
    assert [claim.verdict for claim in claims if "(I-B)" in claim.paper] == verdicts


def test_both_sentences_on_more_local_iterations_have_a_claim() -> None:
    """Section I-B says that the residual error grows with K, Section V-D that it falls."""
    ends = {3: 1e-3, 15: 5e-4}
    results = [
        Result(f"noisy K={k}", seed, {"errors": [0.5, end], "diverged": False})
        for k, end in ends.items()
        for seed in range(3)
    ]
    claims = find("fedgradmp-figure10").conclude(Context(), results)
    found = {claim.statement.partition(":")[2]: claim.verdict for claim in claims}
    assert found[" K = 15 leaves a larger error than K = 3"] == "did not hold"
    assert [c.verdict for c in claims if "no larger" in c.statement] == ["held"]


def test_a_diverged_baseline_counts_as_infinitely_far() -> None:
    values = {"errors": [math.inf], "seconds": 1.0, "diverged": True}
    assert final([Result("a", 0, values)], "a") == [math.inf]

    def verdicts(end: float) -> list[str]:
        results = [
            Result(f"lr={r}", 0, {"errors": [0.5 if r < 0.003 else end], "diverged": False})
            for r in fedgradmp_baselines.FIGURE_8
        ]
        claims = find("fedgradmp-figure8").conclude(Context(), results)[:2]  # of FedIterHT
        return [claim.verdict for claim in claims]

    assert verdicts(3.0) == ["held", "held"]
    assert verdicts(0.9) == ["did not hold", "held"]


def test_rates_under_noise_have_a_claim() -> None:
    """The text speaks of both panels of Figures 1, 10 and 11."""
    for name in ("fedgradmp-figure1", "fedgradmp-figure10", "fedgradmp-figure11"):
        claims = find(name).conclude(Context(), [])
        noisy = [claim for claim in claims if "noise" in claim.statement]
        assert any("after the first round" in claim.statement for claim in noisy)


def test_the_difficulty_of_tuning_is_tested_for_other_baselines_too() -> None:
    claims = find("fedgradmp-figure8").conclude(Context(), [])
    assert [claim.statement.split()[0].strip(":") for claim in claims] == [
        "FedIterHT", "FedIterHT", "FedDualAvg", "FedDualAvg",
    ]  # fmt: skip
