from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from parsifl.algorithms.fedmac import FedMac
from parsifl.core.errors import ClientError, MissingDataError
from parsifl.core.keys import Key
from parsifl.data import ClientData, prepare
from parsifl_reproduction.fedmac import figures as fedmac_figures
from parsifl_reproduction.fedmac import recovery as fedmac_recovery
from parsifl_reproduction.fedmac import setup as fedmac_setup
from parsifl_reproduction.fedmac import sparse as fedmac_sparse
from parsifl_reproduction.fedmac import table1 as fedmac_table1
from parsifl_reproduction.recipe import SCALES, Claim, Context, Job, Recipe, Result, by_label, find

RECIPES = (
    *fedmac_table1.RECIPES,
    *fedmac_figures.RECIPES,
    *fedmac_sparse.RECIPES,
    *fedmac_recovery.RECIPES,
)
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def plan(name: str, **context: Any) -> list[Job]:
    return list(BY_NAME[name].plan(Context(**context)))


def fake(**values: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rounds": 250, "global": 90.0, "personal": 98.0, "parameters": 79510,
        "global_curve": [[250, 90.0]], "personal_curve": [[250, 98.0]],
        "global_loss_curve": [[250, 0.3]], "personal_loss_curve": [[250, 0.1]],
        "density_by_round": [0.5] * 250, "bytes_by_round": [531] * 250,
        "dense_by_round": [1000] * 250,
    }  # fmt: skip
    return {**base, **values}


def claim(claims: Any, *words: str, row: str = "") -> Claim:
    starting = [c for c in claims if c.statement.startswith(row)]
    found = [c for c in starting if all(word in c.statement for word in words)]
    assert len(found) == 1, [c.statement for c in claims]
    match: Claim = found[0]
    return match


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_plans_distinct_jobs_for_every_seed(recipe: Recipe) -> None:
    for scale in SCALES:
        jobs = recipe.plan(Context(scale=scale, seeds=2))
        marks = [(job.label, job.seed) for job in jobs]
        assert len(set(marks)) == len(marks)
        tuned = recipe.name.startswith("fedmac-table1-tuned")  # one seed chooses, the others follow
        assert {seed for _, seed in marks} == ({0} if tuned else {0, 1})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe_without_results_claims_nothing(recipe: Recipe) -> None:
    assert {c.verdict for c in recipe.conclude(Context(), [])} <= {"not run"}


def test_recipes_are_found_by_name() -> None:
    assert all(find(name) is recipe for name, recipe in BY_NAME.items())


def test_every_row_has_every_method() -> None:
    for row in fedmac_table1.ROWS:
        recipe = row.recipe()
        for scale in SCALES:
            labels = {job.label for job in recipe.plan(Context(scale=scale, seeds=1))}
            assert {f"{row.name} {method}" for method in fedmac_setup.TITLES} <= labels
    synthetic = {job.label for job in plan("fedmac-table1-synthetic", seeds=1)}
    assert "Synthetic fedmac samples" in synthetic


def test_figure_3_shares_the_runs_of_the_table() -> None:
    table = {job.fingerprint for job in plan("fedmac-table1", seeds=2)}
    assert table <= {job.fingerprint for job in plan("fedmac-figure3", seeds=2)}
    sparse = {job.fingerprint for job in plan("fedmac-figure4", seeds=2)}
    assert sparse & {job.fingerprint for job in plan("fedmac-figure6", seeds=2)}


def test_settings_are_those_of_tables_2_and_3() -> None:
    ours = fedmac_setup.TABLE_2["fedmac"]
    assert (ours["lr"], ours["outer_lr"], ours["lam"]) == (0.05, 3000.0, 1e-4)
    assert fedmac_setup.TABLE_3["fedmac"]["lr"] == 0.03
    assert fedmac_setup.TABLE_3["heurfedamp"]["lam"] == 1.0
    coupled = [fedmac_setup.TABLE_3[name] for name in ("fedmac", "pfedme")]
    products = [each["outer_lr"] * each["lam"] for each in coupled]
    assert products == pytest.approx([0.3, 0.3])  # "to make eta * lambda equal"
    assert fedmac_setup.TABLE_3[fedmac_setup.ONCE]["outer_lr"] == 0.02


@pytest.mark.parametrize(
    "table", [fedmac_setup.TABLE_2, fedmac_setup.TABLE_3, fedmac_sparse.SPARSE]
)
def test_every_setting_builds_its_method_with_the_papers_batches(table: Any) -> None:
    for name, options in table.items():
        for weighting in ("uniform", "samples"):
            training = fedmac_setup.Training("MNIST", name, options, 1, 1, weighting)
            method: Any = training.algorithm()
            assert (method.batch_size, method.local_steps) == (20, 20)
            assert getattr(method, "weighting", weighting) == weighting


def test_further_seeds_run_only_the_settings_that_the_first_one_chose() -> None:
    recipe, context = BY_NAME["fedmac-table1-tuned"], Context(seeds=3)
    results = [
        Result(job.label, 0, {"global": 0.9, "personal": 0.9 + 0.05 * ("own=0.9" in job.label)})
        for job in recipe.plan(context)
    ]
    further = recipe.follow(context, results)
    assert {job.seed for job in further} == {1, 2}
    labels = {job.label for job in further}
    assert "MNIST fedmac" in labels
    assert [label for label in labels if "own" in label] == ["MNIST heurfedamp-once own=0.9"]


def test_tuned_rows_try_the_same_settings_on_their_own_data() -> None:
    names = [f"fedmac-table1-tuned{row}" for row in ("", "-fmnist", "-cifar", "-synthetic")]
    settings = [[job.label.partition(" ")[2] for job in plan(name, seeds=3)] for name in names]
    assert all(each == settings[0] for each in settings)
    fingerprints = [job.fingerprint for name in names for job in plan(name, seeds=3)]
    assert len(set(fingerprints)) == len(fingerprints)
    results = [Result("Synthetic fedmac", seed, fake(personal=89.0)) for seed in range(2)] + [
        Result("Synthetic pfedme", seed, fake(personal=87.0)) for seed in range(2)
    ]
    claims = BY_NAME["fedmac-table1-tuned-synthetic"].conclude(Context(), results)
    found = claim(claims, "personal", "pFedMe")
    assert (found.verdict, found.paper) == ("held", "89.06 against 87.50")


def test_settings_with_which_every_client_diverges_are_never_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverge(*_args: Any, **_options: Any) -> None:
        raise ClientError("training", 0, 3, "every client diverged")

    monkeypatch.setattr(fedmac_setup, "simulate", diverge)
    values = plan("fedmac-table1-tuned-synthetic", seeds=1)[0].run(None)
    assert list(values) == ["diverged"]
    results = [
        Result("Synthetic pfedme lr=0.12", 0, values),
        *(Result("Synthetic pfedme", seed, fake(personal=87.0)) for seed in range(2)),
        *(Result("Synthetic fedmac", seed, fake(personal=89.0)) for seed in range(2)),
    ]
    claims = BY_NAME["fedmac-table1-tuned-synthetic"].conclude(Context(), results)
    assert claim(claims, "personal", "pFedMe").verdict == "held"


def test_a_run_that_diverged_counts_against_its_method() -> None:
    results = [
        Result("MNIST fedmac", seed, fake(personal=89.0 + seed, **{"global": 80.0 + seed}))
        for seed in range(3)
    ]
    results += [Result("MNIST pfedme", seed, {"diverged": "every client"}) for seed in range(3)]
    found = claim(BY_NAME["fedmac-table1"].conclude(Context(), results), "personal", "pFedMe")
    assert (found.verdict, found.ours) == ("held", "one side diverged on every seed")
    swapped = [replace(each, label="MNIST fedmac") for each in results[3:]]
    swapped += [replace(each, label="MNIST pfedme") for each in results[:3]]
    found = claim(BY_NAME["fedmac-table1"].conclude(Context(), swapped), "personal", "pFedMe")
    assert found.verdict == "did not hold"


def test_every_tuned_setting_builds_its_method() -> None:
    for name, changes in fedmac_table1.GRID.items():
        for change in changes:
            options = {**fedmac_setup.TABLE_2[name], **change}
            assert fedmac_setup.Training("MNIST", name, options, 1, 1).algorithm()


@pytest.mark.parametrize(
    ("row", "shape", "parameters"),
    [
        ("MNIST", (1, 28, 28), 79510),
        ("FMNIST", (1, 28, 28), 79510),
        ("CIFAR", (3, 32, 32), 246314),
        ("Synthetic", (60,), 1430),
    ],
)
def test_networks_are_the_papers(row: str, shape: tuple[int, ...], parameters: int) -> None:
    module = fedmac_setup.FEDERATIONS[row].module()
    assert module(torch.zeros(2, *shape)).shape == (2, 10)
    assert sum(leaf.numel() for leaf in module.parameters()) == parameters


def test_cost_formula_is_the_papers() -> None:
    parameters = 79510
    dense = parameters * 2 * 64
    assert fedmac_setup.paper_bits(1.0, parameters) == dense
    half = 0.5 * parameters * 2 * 64 + 0.5 * parameters * 2 + parameters
    assert fedmac_setup.paper_bits(0.5, parameters) == half
    assert fedmac_setup.paper_ratio(fake()) == pytest.approx(0.515625)
    mixed = fake(density_by_round=[1.0, 0.5])
    assert fedmac_setup.paper_ratio(mixed) == pytest.approx((1 + 0.515625) / 2)
    assert fedmac_setup.paper_ratio(mixed, after=1) == pytest.approx(0.515625)


def test_order_of_table_1_is_evaluated_claim_by_claim() -> None:
    results = [
        Result(f"MNIST {method}", seed, fake(**{"global": best, "personal": best + 2}))
        for seed in range(2)
        for method, best in (("fedmac", 96.0 + seed), ("pfedme", 95.0), ("fedavg", 97.5))
    ]
    claims = BY_NAME["fedmac-table1"].conclude(Context(), results)
    assert claim(claims, "global", "pFedMe").verdict == "held"
    assert claim(claims, "global", "FedAvg").verdict == "did not hold"
    assert claim(claims, "global", "FedProx").verdict == "not run"
    assert claim(claims, "HeurFedAMP (").counted  # the paper's variant has a line of its own
    assert not claim(claims, "HeurFedAMP iterating once").counted


def test_synthetic_clients_are_read_in_two_ways_and_counted_once() -> None:
    claims = BY_NAME["fedmac-table1-synthetic"].conclude(Context(), [])
    counted = [found for found in claims if not found.counted]
    assert len(counted) == 6
    assert all("1/S, mean over clients" in found.statement for found in counted)


def test_one_seed_tunes_and_the_others_compare() -> None:
    results = [
        Result("MNIST fedmac", 0, fake(personal=97.0)),
        Result("MNIST fedmac local_steps=80", 0, fake(personal=98.5)),
        Result("MNIST pfedme", 0, fake(personal=98.0)),
        Result("MNIST fedmac", 1, fake(personal=99.0)),
        Result("MNIST fedmac local_steps=80", 1, fake(personal=97.5)),
        Result("MNIST pfedme", 1, fake(personal=98.0)),
    ]
    claims = BY_NAME["fedmac-table1-tuned"].conclude(Context(), results)
    found = claim(claims, "personal", "pFedMe")
    assert found.verdict == "did not hold"
    assert "fedmac local_steps=80" in found.note


@pytest.mark.parametrize(("losses", "verdict"), [(1, "held"), (3, "did not hold")])
def test_most_settings_are_most_pairs_of_the_first_seed(losses: int, verdict: str) -> None:
    ours = [f"MNIST fedmac local_steps={steps}" for steps in (10, 20, 40, 80)]
    scores = {label: 96.0 if at < losses else 99.0 for at, label in enumerate(ours)}
    scores |= {f"MNIST {method}": 98.0 for method in ("pfedme", "perfedavg", fedmac_setup.ONCE)}
    results = [
        *(Result(label, 0, fake(personal=score)) for label, score in scores.items()),
        *(Result(label, 1, fake(personal=0.0)) for label in ours),  # compares, and chooses nothing
    ]
    claims = BY_NAME["fedmac-table1-tuned"].conclude(Context(), results)
    found = claim(claims, "personal model", "most pairs")
    assert found.verdict == verdict
    assert f"{100 * (4 - losses) / 4:.0f} against pFedMe" in found.ours


def test_a_setting_that_diverged_loses_its_pairs() -> None:
    results = [
        Result("MNIST fedmac", 0, fake(personal=99.0)),
        Result("MNIST fedmac lr=0.5", 0, {"diverged": "every client"}),
        Result("MNIST pfedme", 0, fake(personal=98.0)),
        Result("MNIST pfedme lr=0.12", 0, {"diverged": "every client"}),
    ]
    claims = BY_NAME["fedmac-table1-tuned"].conclude(Context(), results)
    assert claim(claims, "personal model", "most pairs").ours == "50 against pFedMe"


def test_the_personal_model_is_compared_with_the_best_global_one() -> None:
    methods = {"fedmac": 98.0, "fedavg": 97.0, "fedprox": 98.5, "pfedme": 96.0}
    results = [
        Result(f"MNIST {method}", seed, fake(**{"personal": 98.2, "global": best}))
        for seed in range(3)
        for method, best in methods.items()
    ]
    claims = BY_NAME["fedmac-table1-tuned"].conclude(Context(), results)
    assert claim(claims, "every tuned global model").ours.startswith("98.20 ± 0.00 against 98.50")


def test_the_squared_distance_must_need_as_many_rows_as_no_prior() -> None:
    recipe = BY_NAME["fedmac-theorem3"]

    def verdict(squared: float) -> str:
        results = [
            Result(job.label, job.seed, {"half": half, "predicted": half})
            for job in recipe.plan(Context(seeds=2))
            for half in [squared if ": l2" in job.label else 33.0]
        ]
        claims = recipe.conclude(Context(), results)
        return claim(claims, "as many samples", row=fedmac_recovery.CASES[0].title).verdict

    assert verdict(31.0) == "held"
    assert verdict(25.0) == "did not hold"


def test_sparse_claims_follow_density_and_bytes() -> None:
    dense_then_sparse = [0.9] * 10 + [0.5] * 240
    ours = fake(density_by_round=dense_then_sparse, personal_curve=[[5, 99.0], [250, 98.0]])
    theirs = fake(personal=96.2, density_by_round=[0.86] * 250)
    results = [Result("fedmac", 0, ours), Result("pfedme", 0, theirs)]
    claims = BY_NAME["fedmac-figure4"].conclude(Context(), results)
    better = claim(claims, "personal", "by 1.5 points")
    assert better.verdict == "held"
    assert "98.00 against 96.20" in better.ours  # not the 99.00 of a round with 90 % non-zeros
    assert claim(claims, "sparser").ours.startswith("86.00 against 50.00")
    assert claim(claims, "real bytes").verdict == "held"
    assert claim(claims, "multiplications").ours.startswith("50.00 against 100.00")
    assert claim(claims, "sparseness costs").verdict == "held"
    weaker = fake(personal=99.0)  # a point above its last round
    again = BY_NAME["fedmac-figure4"].conclude(Context(), [Result("fedmac", 0, weaker)])
    assert claim(again, "sparseness costs").verdict == "did not hold"
    assert claim(claims, "fewer rounds").ours.startswith("250.00 against 11.00")
    costly = fake(bytes_by_round=[600] * 250)
    again = BY_NAME["fedmac-figure4"].conclude(Context(), [Result("fedmac", 0, costly)])
    assert claim(again, "real bytes").verdict == "did not hold"


def test_a_larger_beta_is_compared_at_the_best_and_at_later_rounds() -> None:
    curves = {1.0: [[100, 98.0], [400, 98.5]], 4.0: [[100, 98.2], [400, 97.0]]}
    results = [
        Result(
            f"beta={beta:g}",
            0,
            fake(
                personal=curve[0][1],
                personal_curve=curve,
                global_loss_curve=[[400, 1 / beta]],
                personal_loss_curve=[[400, 1 / beta]],
            ),
        )
        for beta, curve in curves.items()
    ]
    claims = BY_NAME["fedmac-figure2"].conclude(Context(), results)
    assert claim(claims, "weakens", "best round").verdict == "did not hold"
    assert claim(claims, "weakens", "at round 100").verdict == "did not hold"
    assert claim(claims, "weakens", "at round 400").verdict == "held"
    assert claim(claims, "beta", "training loss", "global").verdict == "held"
    assert claim(claims, "beta", "training loss", "personal").verdict == "did not hold"
    runs: list[Any] = [job.run for job in plan("fedmac-figure2", seeds=1)]
    assert all(run.args[0].train for run in runs)


def test_figure_6_measures_speed_at_the_floor_and_says_so() -> None:
    deviations = " ".join(BY_NAME["fedmac-figure6"].deviations(Context()))
    assert "75 %" not in deviations
    assert "floor of 50 %" in deviations


def test_gamma_w_is_evaluated_by_speed_and_by_both_models() -> None:
    late, early = [1.0] * 99 + [0.5] * 151, [1.0] * 49 + [0.5] * 201
    weaker = {"global_curve": [[250, 80.0]], "personal_curve": [[250, 97.8]]}
    results = [
        Result("gamma_w=0", 0, fake(density_by_round=late)),
        Result("gamma_w=1e-06", 0, fake(density_by_round=early, **weaker)),
    ]
    claims = BY_NAME["fedmac-figure6"].conclude(Context(), results)
    assert claim(claims, "gamma_w = 1e-06 makes").verdict == "held"
    assert claim(claims, "gamma_w = 1e-06 costs the personal").verdict == "held"
    assert claim(claims, "gamma_w = 1e-06 costs the global").verdict == "did not hold"


def test_job_trains_evaluates_and_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = prepare("digits", clients=4, partition="pathological:classes=2")
    federation = fedmac_setup.Federation("digits", 4, 2, lambda: _flat_linear())
    monkeypatch.setattr(fedmac_setup.Federation, "prepare", lambda *_: tiny)
    monkeypatch.setattr(fedmac_setup, "FEDERATIONS", {"MNIST": federation})
    options = {**fedmac_sparse.SPARSE["fedmac"], "threshold": 1e9}
    training = fedmac_setup.Training("MNIST", "fedmac", options, 3, 1, train=True)
    values = fedmac_setup.job("x", training, 0, Context()).run(tmp_path)
    assert values["rounds"] == 3
    assert values["density_by_round"] == pytest.approx([0.5] * 3, abs=0.01)
    assert len(values["bytes_by_round"]) == 3
    assert 0 < values["global"] <= values["personal"] <= 100
    assert values["parameters"] == 650
    assert len(values["personal_loss_curve"]) == 3
    by_client, by_row = values["global_curve"][-1][1], values["global_rows_curve"][-1][1]
    assert by_client != by_row  # clients have different sizes
    found = json.loads((tmp_path / "run/clients.json").read_text())["global"]["test"]
    assert by_row == pytest.approx(100 * np.average(found["accuracy"], weights=found["samples"]))
    assert by_client == pytest.approx(100 * np.mean(found["accuracy"]))


def _flat_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_missing_data_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> ClientData:
        raise MissingDataError("not on this machine\nmore")

    monkeypatch.setattr(fedmac_setup.Federation, "prepare", refuse)
    training = fedmac_setup.Training("CIFAR", "fedmac", {}, 1, 1)
    values = fedmac_setup.job("CIFAR fedmac", training, 0, Context()).run(None)
    assert values == {"skipped": "not on this machine"}
    assert by_label([Result("CIFAR fedmac", 0, values)]) == {}


def test_splitting_solves_the_linear_program() -> None:
    """min |x|_1 - zeta <x, w> under A x = b is a linear program in the parts of x."""
    theta, prior = fedmac_recovery.CASES[0].draw(Key(0))
    matrix = np.random.default_rng(0).normal(size=(24, theta.size))
    target = matrix @ theta
    kinds: tuple[fedmac_recovery.Prior, ...] = ("none", "correlation", "sign")
    for kind in kinds:
        used, zeta = fedmac_recovery.usable(kind, prior, 0.0 if kind == "none" else 0.9)
        found = fedmac_recovery.solve(
            matrix[None], target[None], kind, used[None], np.array([zeta])
        )[0]
        exact: Any = linprog(
            np.concatenate([1 - zeta * used, 1 + zeta * used]),
            A_eq=np.concatenate([matrix, -matrix], axis=1),
            b_eq=target,
        )
        value = np.abs(found).sum() - zeta * used @ found
        np.testing.assert_allclose(matrix @ found, target, atol=1e-8)
        assert value == pytest.approx(exact.fun, abs=2e-2)


def test_correlation_recovers_from_fewer_rows_than_the_others() -> None:
    case = fedmac_recovery.CASES[0]

    def rate(kind: fedmac_recovery.Prior) -> float:
        return fedmac_recovery.recovery_rate(case, kind, 1.0, 20, 6, 0)

    assert rate("correlation") == 1.0
    assert max(rate("none"), rate("l2")) <= 0.2


def test_priors_are_wrong_where_the_case_says() -> None:
    for case in fedmac_recovery.CASES:
        theta, prior = case.draw(Key(3))
        assert (theta != 0).sum() == fedmac_recovery.NONZEROS
        equal = len(set(np.abs(theta[theta != 0]).tolist())) == 1
        assert equal == (case.magnitudes == "signs")
        wrong = (prior != 0) & (theta == 0)
        assert wrong.sum() == (fedmac_recovery.WRONG if case.off else 0)


def test_prediction_without_prior_is_the_known_statistical_dimension() -> None:
    """Ten non-zeros of a hundred: about 33 rows (Amelunxen et al., 2014, Figure 1)."""
    theta, prior = fedmac_recovery.CASES[0].draw(Key(0))
    found = fedmac_recovery.predicted_rows(theta, "none", prior, 0.0)
    assert found == pytest.approx(33, abs=1.5)
    _, near = fedmac_recovery.usable("correlation", prior, 1.0)
    assert fedmac_recovery.predicted_rows(theta, "correlation", prior, near) < 0.6 * found


def test_mnist_federation_is_that_of_the_paper(data_folder: Path) -> None:
    data = fedmac_setup.FEDERATIONS["MNIST"].prepare(0, str(data_folder))
    assert len(data) == 20
    labels = [set(data.y[np.asarray(part)].tolist()) for part in data.train]
    assert labels == [{u % 10, (u + 1) % 10} for u in range(20)]
    rows = [len(a) + len(b) for a, b in zip(data.train, data.test, strict=True)]
    assert sum(rows) == 70000
    assert len(set(rows)) > 10
    shares = [len(part) / total for part, total in zip(data.test, rows, strict=True)]
    assert shares == pytest.approx([0.25] * 20, abs=0.002)


def test_the_preset_of_figure_4_is_that_of_the_recipe() -> None:
    preset = FedMac.presets["paper:figure4"].settings
    used = {**fedmac_sparse.SPARSE["fedmac"], "local_steps": 20, "batch_size": 20}
    assert {**preset, "floor": FedMac().floor} == used


def test_sparse_runs_have_equal_products_and_stable_steps() -> None:
    products = [options["outer_lr"] * options["lam"] for options in fedmac_sparse.SPARSE.values()]
    assert products[0] == pytest.approx(products[1])
    sparse = fedmac_sparse.SPARSE["fedmac"]
    for gamma_w in fedmac_sparse.GAMMA_W:
        assert sparse["outer_lr"] * (sparse["lam"] + gamma_w / sparse["rho"]) < 2
