from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import DataError
from parsifl.core.keys import Key
from parsifl.data import ClientData
from parsifl.masks.instance import bias
from parsifl.nn.neural import NeuralProblem
from parsifl_reproduction.perfedmask import costs as perfedmask_costs
from parsifl_reproduction.perfedmask import masks as perfedmask_masks
from parsifl_reproduction.perfedmask import setup as perfedmask_setup
from parsifl_reproduction.perfedmask import tables as perfedmask_tables
from parsifl_reproduction.perfedmask.setup import FEDERATIONS, SEVEN, TITLES, Cell, configured
from parsifl_reproduction.recipe import Claim, Context, Recipe, Result, find, recipes

OURS = [recipe for name, recipe in recipes().items() if name.startswith("perfedmask-")]
SMALL, FULL = Context(seeds=1), Context(scale="full", seeds=1)


def result(cell: Cell, **values: Any) -> Result:
    return Result(cell.label, 0, values)


def claim(claims: Sequence[Claim], *words: str) -> Claim:
    (found,) = [c for c in claims if all(word in c.statement for word in words)]
    return found


def test_every_table_and_figure_is_there() -> None:
    tables = {f"perfedmask-table{number}" for number in range(1, 10)}
    figures = {f"perfedmask-figure{number}" for number in range(3, 7)}
    assert {recipe.name for recipe in OURS} == tables | figures | {"perfedmask-all"}


@pytest.mark.parametrize("recipe", OURS, ids=lambda recipe: str(recipe.name))
def test_recipe_without_results_claims_nothing(recipe: Recipe) -> None:
    for context in (SMALL, FULL):
        assert {c.verdict for c in recipe.conclude(context, [])} == {"not run"}


@pytest.mark.parametrize("recipe", OURS, ids=lambda recipe: str(recipe.name))
def test_plans_have_no_job_twice(recipe: Recipe) -> None:
    for context in (SMALL, FULL):
        jobs = [(job.label, job.seed) for job in recipe.plan(context)]
        assert jobs
        assert len(set(jobs)) == len(jobs)


def test_full_table_1_has_all_methods_data_and_participations() -> None:
    labels = {job.label for job in find("perfedmask-table1").plan(FULL)}
    assert labels == {
        f"{data} {method} c={c:g} nu=0.5"
        for data in ("CIFAR-10", "CIFAR-100")
        for method in SEVEN
        for c in (1, 0.1)
    }


def test_small_scale_compares_seven_methods_and_three_designs() -> None:
    labels = [job.label for job in find("perfedmask-all").plan(SMALL)]
    assert len(labels) == 9
    assert all(label.startswith("small") for label in labels)


@pytest.mark.parametrize("name", list(TITLES))
def test_methods_are_set_as_in_the_paper(name: str) -> None:
    method, strong, weak = configured(name, FEDERATIONS["CIFAR-10"])
    settings: Any = method
    assert (settings.lr, settings.momentum, settings.weight_decay, settings.batch_size) == (
        0.1,
        0.9,
        5e-4,
        50,
    )
    assert [settings.learning_rate(t) for t in (0, 40, 60)] == pytest.approx([0.1, 0.01, 0.001])
    assert strong == {"epochs": 4}
    assert weak != strong
    slower = name in ("fedavg", "fedprox", "fednova", "fedbabu")
    assert weak["epochs"] == (2 if slower else 4)


def test_table_6_is_reproduced_exactly() -> None:
    recipe = find("perfedmask-table6")
    results = [Result(job.label, 0, job.run(None)) for job in recipe.plan(SMALL)]
    claims = recipe.conclude(SMALL, results)
    assert [c.verdict for c in claims] == ["held"] * 7


def test_biases_of_table_6_follow_from_its_masks() -> None:
    """Selections 1 of Figures 2 (a) and 2 (d), typed in from the paper."""
    selections: dict[Fraction, list[str]] = {
        Fraction(8, 3): ["1000", "1000", "1111"],
        Fraction(4): ["1000", "0100", "1111"],
        Fraction(10, 3): ["1000", "1100", "1111"],
        Fraction(2): ["1100", "0011", "1111"],
    }
    for value, rows in selections.items():
        masks = np.array([[digit == "1" for digit in row] for row in rows])
        assert bias(np.ones(4), masks) == pytest.approx(float(value))


@pytest.mark.slow
def test_table_5_cannot_be_what_the_paper_says() -> None:
    values = perfedmask_masks._run_table5(None)
    claims = find("perfedmask-table5").conclude(SMALL, [Result("masks", 0, values)])
    assert values["0.125"]["optimal"] == pytest.approx((2_565_580.8, 2_596_940.8))
    assert values["0.125"]["sequential"][0] == pytest.approx(2_565_580.8)
    assert values["0.125"]["random"][0] == pytest.approx(7.6e6, rel=0.02)
    assert values["0.95"]["bias_bound"] >= 0.32e6
    assert claim(claims, "some masks reach").verdict == "did not hold"
    assert claim(claims, "least J").verdict == "held"


def test_order_of_a_table_is_judged_by_its_sign() -> None:
    cells = {method: Cell("CIFAR-10", method) for method in ("perfedmask", "fedavg", "fedbabu")}
    results = [
        result(cells["perfedmask"], after=80.0, forward=2e9, backward=3e9),
        result(cells["fedavg"], after=79.0, forward=1e9, backward=1.5e9),
        result(cells["fedbabu"], after=81.0),
    ]
    claims = find("perfedmask-table1").conclude(FULL, results)
    assert claim(claims, "CIFAR-10, c = 1", "FedAvg").verdict == "held"
    assert "5.00 against 2.50 GFLOP" in claim(claims, "CIFAR-10, c = 1", "FedAvg").note
    assert claim(claims, "CIFAR-10, c = 1", "FedBABU").verdict == "did not hold"
    assert claim(claims, "CIFAR-10, c = 1", "FedProx").verdict == "not run"
    assert claim(claims, "CIFAR-10, c = 0.1", "FedBABU").statement.count("below") == 1


def test_designs_of_masks_differ_at_small_scale() -> None:
    federation = FEDERATIONS["small"]
    problem = NeuralProblem(federation.module)
    _, strong, weak = configured("perfedmask", federation)
    infos = [ClientInfo(n, 50, weak if n < 5 else strong) for n in range(10)]
    found = set()
    for design in ("perfedmask", "perfedmask sequential", "perfedmask random"):
        method: Any = configured(design, federation)[0]
        server = method.init_server(problem, infos, Key(0))
        found.add((server.masks, server.chosen))
    assert len(found) == 3


def test_at_small_scale_every_method_is_judged_once() -> None:
    claims = find("perfedmask-table1").conclude(SMALL, [])
    assert len(claims) == len(SEVEN) - 1


def test_fine_tuning_and_strength_are_judged() -> None:
    tuned = [
        result(Cell("CIFAR-10", "perfedmask", tune_epochs=n).at(SMALL), after=value)
        for n, value in ((0, 60.0), (2, 80.0), (10, 81.0))
    ]
    claims = find("perfedmask-table3").conclude(SMALL, tuned)
    assert claim(claims, "perfedmask: 2 epochs").verdict == "held"
    rising = [
        result(cell.at(SMALL), before=40.0 + 10 * cell.nu) for cell in perfedmask_tables.TABLE_4
    ]
    (found,) = find("perfedmask-table4").conclude(SMALL, rising)
    assert (found.verdict, found.note) == ("held", "4 of 4 steps go up")


def test_curves_and_boxes_are_judged() -> None:
    ends = {"perfedmask": 2.0, "fedbabu": 1.5, "fedavg": 1.0}
    results = [
        result(
            Cell("small", name),
            loss_curve=[[1, 3.0], [2, end]],
            accuracy_curve=[[1, 10.0], [2, 10 * end]],
            after=10 * end,
            after_worst_decile=end,
        )
        for name, end in ends.items()
    ]
    (loss,) = find("perfedmask-figure4").conclude(SMALL, results)
    assert loss.verdict == "held"
    (accuracy,) = find("perfedmask-figure5").conclude(SMALL, results)
    assert accuracy.ours == "20.00 against 10.00"
    boxes = find("perfedmask-figure6").conclude(SMALL, results)
    assert claim(boxes, "worst tenth", "FedAvg").verdict == "held"


def test_costs_of_a_step_are_counted_for_both_kinds_of_devices() -> None:
    def network(width: float = 1.0) -> nn.Module:
        channels = round(8 * width)
        return nn.Sequential(
            nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 2 * channels, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10),
        )  # fmt: skip

    problem = NeuralProblem(network)
    small = replace(FEDERATIONS["small"], part=0.25, budget=0.325)
    masked, strong, weak = configured("perfedmask", small)
    found = perfedmask_costs.step_costs(masked, problem, [weak, strong])
    assert found["weak_backward"] < found["strong_backward"]
    assert found["trainable"] == (224 + 1392) / 2
    babu, strong, weak = configured("fedbabu", small)
    whole = perfedmask_costs.step_costs(babu, problem, [weak, strong])
    assert whole["trainable"] == 1392
    results = [
        Result("CIFAR-10 perfedmask cost", 0, found),
        Result("CIFAR-10 fedbabu cost", 0, whole),
    ]
    claims = find("perfedmask-table2").conclude(SMALL, results)
    told = claim(claims, "CIFAR-10, PerFedMask:", "backward")
    assert told.paper == "0.778"
    assert told.verdict in ("held", "did not hold")


def tiny() -> ClientData:
    torch.manual_seed(0)
    rows = [(torch.rand(60, 3, 8, 8), torch.arange(60) % 3) for _ in range(4)]
    return ClientData.of(rows, test=0.2)


@pytest.mark.parametrize("name", list(TITLES))
def test_job_trains_judges_and_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def network(width: float = 1.0) -> nn.Module:
        channels = round(8 * width)
        return nn.Sequential(
            nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels, track_running_stats=False),
            nn.ReLU(), nn.Conv2d(channels, channels, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3),
        )  # fmt: skip

    federation = replace(
        FEDERATIONS["small"], rounds=1, strong={"local_steps": 2}, weak={"local_steps": 1}
    )
    monkeypatch.setattr(perfedmask_setup.Federation, "prepare", lambda *_: tiny())
    monkeypatch.setattr(perfedmask_setup.Federation, "module", lambda _, width=1.0: network(width))
    monkeypatch.setattr(
        perfedmask_setup, "FEDERATIONS", {"small": replace(federation, part=0.5, budget=0.5)}
    )
    made = perfedmask_setup.job(Cell("small", name), 0, SMALL)
    values = made.run(None)
    assert 0 <= values["before"] <= 100
    assert 0 < values["after"] <= 100
    assert values["forward"] > 0
    assert values["sent"] > 0
    assert values["accuracy_curve"][0][0] == 1


def test_missing_data_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> ClientData:
        raise DataError("not on this machine\nmore")

    monkeypatch.setattr(perfedmask_setup.Federation, "prepare", refuse)
    values = perfedmask_setup.job(Cell("CIFAR-10", "fedavg"), 0, FULL).run(None)
    assert values == {"skipped": "not on this machine"}


def test_domainnet_is_not_among_the_data_and_says_so() -> None:
    values = perfedmask_setup.job(Cell("DomainNet", "fedavg"), 0, FULL).run(None)
    assert "domainnet" in values["skipped"]
