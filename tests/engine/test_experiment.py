from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parsifl import data
from parsifl.core import registry, tree
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.clients import ClientData
from parsifl.engine.experiment import Experiment, problem_for, profiles
from parsifl.engine.simulate import simulate
from parsifl.flower.hello import DataSchema
from parsifl.linear.glm import GLM
from parsifl.nn.neural import NeuralProblem

QUICK = Experiment("fedavg", {"local_steps": 1}, clients=4, rounds=1)


def test_values_from_a_file_become_an_experiment() -> None:
    found = Experiment.read(
        {"algorithm": "ditto", "rounds": 3, "evaluation": {"select": "best-test"}, "settings": {}}
    )
    assert (found.algorithm, found.rounds, found.evaluation.select) == ("ditto", 3, "best-test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounds": 3}, "no algorithm given"),
        ({"algorithm": "fedavg", "round": 3}, "^unknown setting 'round'; did you mean 'rounds'"),
        ({"algorithm": "fedavg", "rounds": "many"}, "^rounds = 'many'"),
        ({"algorithm": "fedavg", "evaluation": {"selct": "last"}}, "did you mean 'select'"),
    ],
)
def test_mistakes_in_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.read(values)


@pytest.mark.bits
def test_the_same_experiment_gives_the_same_bits() -> None:
    first, second = QUICK.run().server, QUICK.run().server
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = replace(QUICK, seed=1).run().server
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "datafit"), [("fedht-classification", "logistic"), ("fedht-regression", "squared")]
)
def test_simulated_regressions_are_fitted_by_a_linear_model(name: str, datafit: str) -> None:
    problem = problem_for("auto", data.prepare(f"{name}:clients=3,samples=20"))
    assert isinstance(problem, GLM)
    assert problem.datafit.name == datafit


def test_the_model_fits_the_data() -> None:
    digits = data.prepare("digits", clients=4)
    assert isinstance(problem_for("auto", digits), NeuralProblem)
    assert isinstance(problem_for("glm", digits), GLM)
    rows = np.zeros((8, 3))
    real = ClientData.of([(rows, np.linspace(0, 1, 8))])
    regression = problem_for("auto", real)
    assert isinstance(regression, GLM)
    assert regression.primary_metric == "mse"
    with pytest.raises(DataError, match="--model glm"):
        problem_for("mlp", real)
    for wrong, message in (
        ("glm:l3=1", "unknown setting of GLM 'l3'; known: .*intercept, keep, l2"),
        ("glm:l2=strong", "GLM.l2 = 'strong': .* valid number"),
        ("glm:dtype=float16", "GLM.dtype = 'float16': .* instance of dtype"),
        ("glm:keep=first", "GLM.keep = 'first': .* valid integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            problem_for(wrong, real)
    kept = problem_for("glm:keep=2", real)
    assert isinstance(kept, GLM)
    assert kept.unpenalized["coef"] == (2,)


def test_a_linear_model_runs_on_pictures() -> None:
    run = replace(QUICK, model="glm:l2=0.01").run()
    assert run.server["coef"].shape == (10, 64)


def test_devices_are_dealt_in_groups() -> None:
    assert profiles("", 2) == ({}, {})
    dealt = profiles("budget=0.125+1,epochs=2", 3)
    assert [profile["budget"] for profile in dealt] == [0.125, 0.125, 1]
    assert {profile["epochs"] for profile in dealt} == {2}


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ("bugdet=0.5", "did you mean 'budget'"),
        ("local_steps=1.5", "whole"),
        ("epochs=inf", "finite"),
    ],
)
def test_bad_profiles_are_named(profiles: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(QUICK, profiles=profiles).run()


def test_entries_of_a_profile_that_are_not_read_are_told() -> None:
    masked = replace(QUICK, algorithm="perfedmask", model="mlp:hidden=16+16")
    with pytest.warns(UserWarning, match="PerFedMask does not read width .*reads budget, epochs"):
        replace(masked, profiles="width=0.5+1").run()
    with pytest.warns(UserWarning, match="FedAvg does not read budget, width"):
        replace(QUICK, profiles="budget=0.5+1,width=0.5+1,epochs=1+2").run()
    sliced = replace(masked, settings={"base": "heterofl"}, profiles="width=0.5+1,local_steps=1+2")
    sliced.run()
    replace(masked, algorithm="heterofl", profiles="width=0.5+1").run()


def test_a_device_with_steps_and_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match="client 0 has both epochs and local_steps"):
        replace(QUICK, algorithm="fednova", profiles="local_steps=2+4,epochs=1").run()


def test_numbers_of_numpy_are_budgets_and_widths() -> None:
    problem = problem_for("mlp:hidden=16+16", data.prepare("digits", clients=4))
    plain: list[dict[str, Any]] = [{"budget": 0.5, "width": 0.5, "local_steps": 1}] * 2
    plain += [{"budget": 1.0, "width": 1.0, "local_steps": 2}] * 2
    typed = [
        {
            "budget": np.float32(p["budget"]),
            "width": np.float64(p["width"]),
            "local_steps": np.int64(p["local_steps"]),
        }
        for p in plain
    ]
    method = registry.get("perfedmask", base="heterofl", tune_epochs=0.0)
    runs = [
        simulate(method, problem, replace(data.prepare("digits", clients=4), profiles=given), 1)
        for given in (plain, typed)
    ]
    assert runs[0].bytes_up == runs[1].bytes_up
    assert all(torch.equal(runs[0].server.params[n], v) for n, v in runs[1].server.params.items())


def test_unequal_devices_do_unequal_work() -> None:
    equal = replace(QUICK, settings={"local_steps": 4}).run().metrics[0]["flops"]
    unequal = (
        replace(QUICK, settings={"local_steps": 4}, profiles="local_steps=2+4")
        .run()
        .metrics[0]["flops"]
    )
    assert unequal == pytest.approx(0.75 * equal)


def test_budgets_reach_the_masks() -> None:
    masked = replace(
        QUICK, algorithm="perfedmask", model="mlp:hidden=16+16", profiles="budget=0.4+1"
    )
    free = replace(masked, profiles="")
    assert masked.run().bytes_up < free.run().bytes_up


def test_a_model_depends_on_the_form_of_the_rows_alone() -> None:
    digits = data.prepare("digits", clients=4)
    schema = DataSchema.of(digits)
    for name in ("auto", "mlp:hidden=7", "glm"):
        made = [problem_for(name, given).init(Key(0)) for given in (digits, schema)]
        assert tree.same(*made)


def test_known_coefficients_are_compared_with_the_global_model() -> None:
    recovery = Experiment(
        "fedht",
        {"tau": 3, "lr": 0.02},
        "fedgradmp:clients=4,samples=30,dimension=20,sparsity=3,alpha=0.1",
        rounds=3,
    )
    run = recovery.run()
    truth = data.prepare(recovery.data, seed=0).truth
    assert truth is not None
    gap = np.linalg.norm(run.server["coef"].numpy() - truth) / np.linalg.norm(truth)
    assert 0 < gap < 1
    assert run.records[-1].metrics["distance"] == pytest.approx(gap, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "local", "settings": {}},  # without a global model
        {"model": "glm:intercept=true"},  # the intercept is not known
        {"data": "fedht-regression:clients=4,samples=20"},  # every client has its own coefficients
        {"data": "fedgradmp:clients=4,samples=30,dimension=20,sparsity=3,normalize=feature"},
    ],
)
def test_coefficients_that_are_not_comparable_are_not_compared(changes: dict[str, Any]) -> None:
    recovery = Experiment(
        "fedgradmp", {"tau": 3}, "fedgradmp:clients=4,samples=30,dimension=20,sparsity=3", rounds=1
    )
    assert "distance" not in replace(recovery, **changes).run().records[0].metrics
