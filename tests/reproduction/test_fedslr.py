from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from parsifl.core.keys import Key
from parsifl.nn.models import build
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.fedslr import fashion as fedslr_fashion
from parsifl_reproduction.fedslr import setup
from parsifl_reproduction.fedslr.pictures import representations, separation
from parsifl_reproduction.fedslr.tables import dense_total
from parsifl_reproduction.fedslr.trials import NOTE
from parsifl_reproduction.recipe import SCALES, SKIPPED, Context, Result, Scale, find, recipes
from parsifl_reproduction.runner import reproduce

NAMES = sorted(name for name in recipes() if name.startswith("fedslr-"))
OWN = "fedslr-fashion-mnist"  # claims of several tables in the paper's own federation


def test_every_table_and_figure_has_a_recipe() -> None:
    tables = {f"fedslr-table{number}" for number in range(1, 10)}
    assert set(NAMES) - {OWN} == tables | {f"fedslr-figure{number}" for number in range(2, 6)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_plans_name_every_job_once_and_conclude_without_results(name: str, scale: Scale) -> None:
    context = Context(scale, seeds=2)
    recipe = find(name)
    jobs = recipe.plan(context)
    assert jobs
    assert len({(job.label, job.seed) for job in jobs}) == len(jobs)
    claims = recipe.conclude(context, [])
    assert claims
    verdicts = {claim.verdict for claim in claims}
    assert verdicts <= ({"not run", "held"} if name == "fedslr-table2" else {"not run"})


def test_the_dense_total_of_table_2_is_exact() -> None:
    assert f"{dense_total():.2f}" == "893.92"
    # the appendix: LG-FedAvg sends the head alone; its share of the same total on CIFAR-10
    assert round(setup.gigabytes(512 * 10, 512 * 10, 10_000), 2) == 0.41


def test_settings_are_the_papers_at_full_scale() -> None:
    found = setup.settings("fedslr", Context("full"))
    assert found == {
        "lr": 0.1, "lr_decay": 0.998, "weight_decay": 1e-3, "batch_size": 20, "epochs": 2.0,
        "eta_g": 10.0, "lam": 1e-4, "mu": 1e-3, "personal_epochs": 1.0,
    }  # fmt: skip
    assert setup.settings("fedslr", Context("faithful"), mu=0.5)["mu"] == 0.5


def test_recipes_that_train_the_same_name_their_jobs_alike() -> None:
    context = Context(seeds=2)
    jobs = {name: {(j.label, j.seed) for j in find(name).plan(context)} for name in NAMES}
    for name in ("table2", "figure2", "figure3", "figure4", "figure5"):
        assert jobs[f"fedslr-{name}"] <= jobs["fedslr-table1"]
    usual = ("Fashion-MNIST Non-IID fedslr", 1)
    for name in ("table3", "table4", "table5", "table6"):
        assert usual in jobs[f"fedslr-{name}"]
    assert ("Fashion-MNIST Non-IID fedslr lam=10 mu=0.01", 0) in jobs["fedslr-table7"]


def test_a_label_tells_every_setting_that_differs_from_the_usual_ones() -> None:
    context = Context()
    found = setup.cell("Fashion-MNIST", "IID", "fedslr", context, lam=1e-3, eta_g=2.0)
    assert found.label == "Fashion-MNIST IID fedslr eta_g=2"
    full = setup.cell("CIFAR-10", "IID", "fedslr", Context("full"), lam=1e-3)
    assert full.label == "CIFAR-10 IID fedslr lam=0.001"


def test_masks_of_fedspa_come_to_rest_at_the_end() -> None:
    federation = setup.SMALL["Fashion-MNIST"]
    assert setup.settings("fedspa", Context())["horizon"] == federation.rounds


def test_every_method_has_the_rate_that_its_trials_found_best() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in NOTE.partition("| | 0.01 | 0.03 | 0.1 |")[2].partition("\n\n")[0].splitlines()
        if "**" in line
    ]
    assert len(rows) == len(setup.METHODS)
    for title, *cells in rows:
        scores = [float(cell.strip("*")) for cell in cells]
        (bold,) = (place for place, cell in enumerate(cells) if cell.startswith("**"))
        assert scores[bold] == max(scores)
        method = title.partition(",")[0].lower().replace("-", "")
        assert setup.settings(method, Context())["lr"] == (0.01, 0.03, 0.1)[bold]


def test_the_federation_is_the_one_that_was_chosen() -> None:
    found = setup.SMALL["Fashion-MNIST"]
    rows = found.skewed.rpartition("=")[2]
    assert f"| **{rows} rows, {found.clients}/{found.cohort}/{found.rounds}** |" in NOTE


def test_resilience_is_judged_against_the_best_other_personal_method() -> None:
    scores = {"fedslr": 80.0, "ditto": 79.0, "local": 60.0, "fedavg": 85.0}
    results = [
        Result(f"Fashion-MNIST IID {name}", 0, {"personal": score, "global": score})
        for name, score in scores.items()
    ]
    claims = find("fedslr-table1").conclude(Context(seeds=1), results)
    (found,) = (claim for claim in claims if "most resilient" in claim.statement)
    assert "ditto" in found.statement
    assert found.verdict == "held"


def test_a_falling_claim_is_judged_by_means_over_seeds() -> None:
    assert setup.falling("x", "", {"a": [3.0], "b": [2.0], "c": [1.0]}).verdict == "held"
    assert setup.falling("x", "", {"a": [3.0], "b": [4.0], "c": [1.0]}).verdict == "did not hold"


def test_representations_are_what_the_head_reads() -> None:
    problem = NeuralProblem(lambda: build("mlp", inputs=6, hidden=(5,), classes=3))
    params = problem.init(Key(0))
    x = torch.randn(4, 6)
    hidden = representations(problem, params, x)
    weight, bias = (params[name] for name in problem.head)
    torch.testing.assert_close(hidden @ weight.T + bias, problem.predict(params, x))


def test_separation_tells_apart_from_mixed() -> None:
    draw, labels = np.random.default_rng(0), np.arange(40) % 2
    apart = draw.normal(size=(40, 3)) + 20 * labels[:, None]
    assert separation(apart, labels) > 0.8 > separation(draw.normal(size=(40, 3)), labels) + 0.5


def test_missing_data_are_said_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "prepare", _no_data)
    setup._prepared.cache_clear()
    results, claims = reproduce(find("fedslr-table6"), Context(seeds=1), tmp_path)
    assert all(SKIPPED in result.values for result in results)
    assert {claim.verdict for claim in claims} == {"not run"}


def _no_data(*_: object, **__: object) -> None:
    from parsifl.core.errors import DataError

    raise DataError("the dataset is not here")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_end_to_end(
    name: str, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(setup.SMALL["Fashion-MNIST"], clients=5, cohort=3, rounds=3)
    picture = replace(
        setup.APART[setup.EXPORTED], model="resnet18:width=0.125", clients=3, cohort=2, rounds=2
    )
    monkeypatch.setattr(setup, "SMALL", {"Fashion-MNIST": small})
    monkeypatch.setattr(setup, "APART", {setup.EXPORTED: picture})
    own = replace(fedslr_fashion.FEDERATION, clients=5, cohort=3, rounds=3)
    monkeypatch.setattr(fedslr_fashion, "FEDERATION", own)
    context = Context(seeds=1, data_dir=str(data_folder))
    results, claims = reproduce(find(name), context, tmp_path)
    assert not any(SKIPPED in result.values for result in results)
    assert {claim.verdict for claim in claims} <= {"held", "did not hold"}
    again, _ = reproduce(find(name), context, tmp_path)
    assert [r.values for r in again] == [r.values for r in results]
